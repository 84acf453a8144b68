// modules: record.js draw.js heatmap.js heads.js report.js
// The heads of a report's sentences. What is chosen for one of them is shown of all.
import { page } from "./record.js";
import { watchAppearance } from "./draw.js";
import { forgetMaps, headsSection } from "./heads.js";

const panels = [...document.querySelectorAll(".heads.panel")];

page.records = JSON.parse(document.getElementById("records").textContent);
page.render = () => {
  page.width = panels[0].clientWidth;
  panels.forEach((panel, i) => {
    panel.replaceChildren();
    headsSection.render(page.records[i], panel);
  });
};
watchAppearance(() => {
  forgetMaps(page.records);
  page.render();
});
page.render();
