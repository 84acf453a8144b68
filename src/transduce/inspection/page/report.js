// modules: record.js draw.js heatmap.js heads.js report.js
// The heads of one of a report's sentences, which is chosen from a list.
import { page } from "./record.js";
import { watchAppearance } from "./draw.js";
import { forgetMaps, headsSection } from "./heads.js";

const panel = document.querySelector(".heads.panel");
const picker = document.getElementById("sentence");

page.records = JSON.parse(document.getElementById("records").textContent);
page.render = () => {
  const record = page.records[picker.value];
  page.width = panel.clientWidth;
  document.getElementById("translation").textContent = record.sides.tgt_out.text;
  panel.replaceChildren();
  headsSection.render(record, panel);
};
picker.addEventListener("change", page.render);
watchAppearance(() => {
  forgetMaps(page.records);
  page.render();
});
page.render();
