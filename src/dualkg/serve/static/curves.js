// Curves: the values under the pointer, at the nearest epoch that has some.
//
// Listeners are on the document, since the curves of a training are replaced while it goes on.

import { element } from "./common.js";

const SVG = "http://www.w3.org/2000/svg";
let shown = null; // {svg, tip, rule}

/** The points of all lines of a chart: {name, epoch, text, x}. */
function pointsOf(svg) {
  const points = [];
  for (const line of svg.querySelectorAll("path[data-values]")) {
    const places = line.getAttribute("d").slice(1).split("L").map((pair) => pair.split(",").map(Number));
    line.dataset.values.split(";").forEach((value, number) => {
      const [epoch, ...text] = value.split(" ");
      points.push({ name: line.dataset.name, epoch, text: text.join(" "), x: places[number][0] });
    });
  }
  return points;
}

function hide() {
  shown?.tip.remove();
  shown?.rule.remove();
  shown = null;
}

function show(svg, clientX) {
  const points = pointsOf(svg);
  if (!points.length) return;
  const box = svg.getBoundingClientRect();
  const scale = svg.viewBox.baseVal.width / box.width;
  const x = (clientX - box.left) * scale;
  const nearest = points.reduce((best, point) => (Math.abs(point.x - x) < Math.abs(best.x - x) ? point : best));
  if (shown?.svg !== svg) {
    hide();
    const rule = document.createElementNS(SVG, "path");
    rule.setAttribute("class", "cursor");
    const tip = element("div", { class: "curve-tip", "aria-hidden": "true" });
    svg.append(rule);
    svg.parentElement.append(tip);
    shown = { svg, tip, rule };
  }
  shown.rule.setAttribute("d", `M${nearest.x},14V206`);
  const here = points.filter((point) => point.epoch === nearest.epoch);
  const values = here.map(({ name, text }) => element("span", {}, name && here.length > 1 ? `${name} ${text}` : text));
  shown.tip.replaceChildren(element("b", {}, `epoch ${nearest.epoch}`), ...values);
  const isRight = nearest.x > svg.viewBox.baseVal.width / 2;
  const place = nearest.x / scale;
  shown.tip.style.insetInlineStart = isRight ? "auto" : `${place + 10}px`;
  shown.tip.style.insetInlineEnd = isRight ? `${box.width - place + 10}px` : "auto";
}

function follow(event) {
  const svg = event.target.closest?.("svg.curve");
  if (svg?.querySelector("path[data-values]")) show(svg, event.clientX);
  else hide();
}

document.addEventListener("pointermove", follow);
document.addEventListener("pointerdown", follow);
