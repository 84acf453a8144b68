// All values: the sections of the long page.
import { page } from "./record.js";
import { el, note } from "./draw.js";
import { matricesSection } from "./matrices.js";
import { headsSection } from "./heads.js";
import { positionsSection } from "./positions.js";
import { changeSection, layersSection, tokensSection } from "./tokens.js";

export const SECTIONS = [matricesSection, headsSection, positionsSection, tokensSection, layersSection, changeSection];
const sectionBox = ({ id }) => document.getElementById(id);

// A section is absent if the record says so, unless it has another half to show.
function reasonAgainst(record, id) {
  if (id === "positions" && record.masks?.length) return null;
  return record.absent[id] ?? null;
}

// The focus and the scrolled boxes of a panel, as a function that restores them after it was filled again.
export function keepPlace(panel) {
  const focused = panel.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const scrolled = [...panel.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
  return () => {
    panel.querySelectorAll(".scroll").forEach((box, i) => {
      const place = box.dataset.center ? Number(box.dataset.center) - box.clientWidth / 2 : scrolled[i];
      if (place > 0) box.scrollLeft = place;
    });
    if (focused) panel.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  };
}

function fillPanel(section, record, panel) {
  panel.replaceChildren();
  if (page.records.length > 1) panel.append(el("p.model-name", record.model.name));
  const reason = reasonAgainst(record, section.id);
  try {
    if (reason) panel.append(note(reason));
    else section.render(record, panel);
  } catch (error) {
    console.error(error);
    panel.append(note(`This section cannot be drawn: ${error.message}`));
  }
}

// Sizes are read before anything changes, so that the browser computes the layout once.
export function drawSections(wanted) {
  const boxes = wanted.map((section) => sectionBox(section).querySelector(".panels"));
  for (const box of boxes) {
    while (box.children.length < page.records.length) box.append(el("div.panel"));
    while (box.children.length > page.records.length) box.lastChild.remove();
    box.classList.toggle("two", page.records.length > 1);
  }
  page.width = boxes[0]?.firstChild?.clientWidth || 340;
  const restore = boxes.flatMap((box) => [...box.children].map(keepPlace));
  wanted.forEach((section, n) => page.records.forEach((record, i) => fillPanel(section, record, boxes[n].children[i])));
  wanted.forEach((section, n) => {
    boxes[n].previousElementSibling.hidden = page.records.every((record) => reasonAgainst(record, section.id));
  });
  for (const one of restore) one();
}

export function isInView(section) {
  const { top, bottom } = sectionBox(section).getBoundingClientRect();
  return top < innerHeight && bottom > 0;
}

let later = 0;

// Draw the sections in view first; the others follow when these have been painted. Then call `done`.
export function drawAllSections(done) {
  const first = SECTIONS.filter(isInView);
  drawSections(first);
  const rest = SECTIONS.filter((section) => !first.includes(section));
  cancelAnimationFrame(later);
  later = requestAnimationFrame(() => {
    later = requestAnimationFrame(() =>
      setTimeout(() => {
        drawSections(rest);
        done();
      }),
    );
  });
}

// Create the sections; `appear` is called when one comes into view.
export function buildSections(box, nav, appear) {
  const current = new IntersectionObserver(
    (entries) =>
      entries.forEach((entry) => {
        nav.querySelector(`[data-section="${entry.target.id}"]`).toggleAttribute("aria-current", entry.isIntersecting);
      }),
    { rootMargin: "-45% 0px -50% 0px" },
  );
  const appeared = new IntersectionObserver(appear);
  for (const [i, section] of SECTIONS.entries()) {
    const node = el(
      "section",
      { id: section.id },
      el("h2", `${i + 1}. ${section.title}`),
      el("p", section.text),
      el("div.panels"),
    );
    box.append(node);
    const go = (event) => {
      event.preventDefault(); // the address has the choices of the reader
      node.scrollIntoView();
    };
    nav.append(el("a", { href: `#${section.id}`, "data-section": section.id, click: go }, section.title));
    current.observe(node);
    appeared.observe(node);
  }
}
