// Vectors as strips of cells, and weight matrices as pictures, whose cells can be chosen.
import { at, format, isSigned, labelsOf, largest, matrix, placeText, rowAt, set, view, within } from "./record.js";
import { el, paint, stepOf } from "./draw.js";

const flat = (lead) => lead.join(",");

function painted(m, most, signed) {
  const canvas = paint(m, most, signed);
  canvas.setAttribute("aria-hidden", "true");
  return canvas;
}

// The row of a value at an index of its earlier axes; a click or the arrow keys choose a cell.
// numbers: in place of the row's, in a lesson. label: for screen readers. kind: q, k, v or other, for the colour of the
// frame. segments: heads side by side.
export function strip(record, value, lead, { label, kind = "", segments = 0, segment = 0, numbers } = {}) {
  const whole = matrix(value.data, lead.slice(0, -1));
  const row = lead.at(-1);
  const data = numbers ?? rowAt(whole, row);
  const labels = labelsOf(record, value.columns, data.length);
  const say = (j) => `${placeText(value.axes.at(-1), j, labels)}: ${format(data[j])}`;
  const choose = (j) => set({ cell: value.name, index: [...lead, within(j, data.length)] });
  const cellAt = (event) => Math.floor((event.offsetX / box.clientWidth) * data.length);
  const here = () => (isChosenRow(box) ? view.index.at(-1) : -1);
  const box = el(
    "div",
    {
      className: `strip ${kind}`,
      tabIndex: 0,
      role: "slider",
      "aria-label": label ?? value.title,
      "aria-valuemin": 1,
      "aria-valuemax": data.length,
      "data-value": value.name,
      "data-row": flat(lead),
      "data-size": data.length,
      "data-key": `strip-${value.name}-${flat(lead)}`,
      pointermove: (event) => (box.title = say(within(cellAt(event), data.length))),
      click: (event) => choose(cellAt(event)),
      keydown: (event) => {
        const step = stepOf(event, { ArrowRight: 1, ArrowLeft: -1, Enter: 1 });
        if (step) choose(here() + step);
      },
    },
    painted({ rows: 1, columns: data.length, data }, largest(whole.data), isSigned(whole.data)),
    el("i.at", { hidden: true }),
  );
  if (segments) {
    const mark = el("i.segment");
    Object.assign(mark.style, { left: `${(100 * segment) / segments}%`, width: `${100 / segments}%` });
    box.append(mark);
  }
  box.say = say;
  return box;
}

// The weights of a product with a row, as x · W: inputs from top to bottom, outputs from left to right.
export function weightPicture(value, head, choose, label) {
  const { weight } = value.product;
  const m = matrix(weight, [head]);
  const turned = { rows: m.columns, columns: m.rows, data: new Float32Array(m.data.length) };
  for (let i = 0; i < m.rows; i++) for (let j = 0; j < m.columns; j++) turned.data[j * m.rows + i] = at(m, i, j);
  const box = el(
    "div.weight",
    {
      role: "img",
      "aria-label": `${label}, ${turned.rows} by ${turned.columns}`,
      title: `${label} [${turned.rows}, ${turned.columns}]`,
      "data-product": value.name,
      "data-size": turned.columns,
      click: (event) => choose(Math.floor((event.offsetX / box.clientWidth) * turned.columns)),
    },
    painted(turned, largest(turned.data), true),
    el("i.at", { hidden: true }),
  );
  return box;
}

// Whether the chosen cell is in the row of a strip.
const isChosenRow = ({ dataset }) => view.cell === dataset.value && flat(view.index.slice(0, -1)) === dataset.row;

function moveCursor(box, j) {
  const cursor = box.querySelector(".at");
  const size = Number(box.dataset.size);
  cursor.hidden = j === null || j >= size;
  Object.assign(cursor.style, { left: `${(100 * j) / size}%`, width: `max(3px, ${100 / size}%)` });
}

// Mark the chosen cell and what it is computed from: the row on the left, the row or column on the right.
export function markCell(stage, { value, index }) {
  const product = value?.product;
  const lead = index.slice(0, -2);
  const [i, j] = index.slice(-2);
  for (const box of stage.querySelectorAll(".strip")) {
    const isChosen = box.dataset.value === value?.name && flat(index.slice(0, -1)) === box.dataset.row;
    moveCursor(box, isChosen ? index.at(-1) : null);
    box.setAttribute("aria-valuenow", isChosen ? index.at(-1) + 1 : 1);
    box.setAttribute("aria-valuetext", box.say(isChosen ? index.at(-1) : 0));
    const row = box.dataset.row;
    const isLeft = box.dataset.value === product?.left && [flat([...lead, i]), flat([i])].includes(row);
    const isRight = box.dataset.value === product?.right && (product.transposed ? row === flat([...lead, j]) : true);
    if (isRight && !product.transposed) moveCursor(box, j);
    box.classList.toggle("source", Boolean(isLeft || isRight));
  }
  for (const box of stage.querySelectorAll(".weight")) {
    moveCursor(box, box.dataset.product === value?.name ? j : null);
  }
}
