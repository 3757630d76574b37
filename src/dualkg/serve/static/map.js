// The map: drawn on a canvas, moved by mouse, finger and keys, coloured by the answers of a question.

import { address, ask, bar, colour, combobox, complain, element, entityAddress, findAmong, findEntities, meant, onTheme, percent, shown, spoken } from "./common.js";
import { Points } from "./points.js";
import { View } from "./view.js";

const MOST_ANSWERS = 200, LABELLED = 12, MOST_LABELS = 80;
const MANY = 4000; // points that are drawn as pixels
const REACH = 14; // pixels
const PAUSE = 2000; // before a map that is being made is asked for again
const SLOW = "The map is on its way. Made for the first time, it may take a minute or two.";
const find = (name) => document.querySelector(`[data-${name}]`);
const [canvas, veil, tip, legend, said, list, form, folded] = ["canvas", "veil", "tip", "legend", "said", "found", "asking", "folded"].map(find);
const knownList = folded.querySelector("ol");
const context = canvas.getContext("2d");

let points = null, names = [], labels = [];
let answers = new Map(); // by id
let asked = -1, over = -1;
let colours = {}, dust = 0, image = null;
let named = []; // boxes of names that are drawn already

const view = new View(canvas, { changed: paintSoon, tapped: open, hovered: hover });

// --- Drawing -------------------------------------------------------------------------------------------------------

let painting = 0;

function paintSoon() {
  painting ||= requestAnimationFrame(() => {
    painting = 0;
    paint();
  });
}

function readColours() {
  colours = Object.fromEntries(["ink", "edge", "soft", "believed-bar", "focus", "surface"].map((name) => [name, colour(`--${name}`)]));
  const probe = new OffscreenCanvas(1, 1).getContext("2d");
  probe.fillStyle = colours.edge;
  probe.fillRect(0, 0, 1, 1);
  const [red, green, blue] = probe.getImageData(0, 0, 1, 1).data;
  dust = red | (green << 8) | (blue << 16);
  paintSoon();
}

function paint() {
  const { width, height, ratio, scale } = view;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  if (!points) return;
  const frame = [...view.place(0, 0), ...view.place(width, height)];
  const crowd = Math.min(1.4, Math.sqrt(2000 / Math.max(points.length, 200)));
  const number = points.count(...frame);
  const least = number > MANY ? 1.6 : 2.6;
  const size = Math.max(least, Math.min(7, 3.2 * crowd * Math.sqrt(scale / view.fitting)));
  if (number > MANY) paintDust(frame, size);
  else paintDots(frame, size);
  paintAnswers(size);
  if (number <= 4 * MOST_LABELS) paintNames(frame, size);
  if (over >= 0) ring(over, colours.ink, Math.max(size / 2, 3) + 3);
}

/** Very many points, written as pixels into an image; where they lie close it is darker. */
function paintDust(frame, size) {
  const { width: across, height: down } = canvas, { x, y } = points, ratio = view.ratio;
  if (image?.width !== across || image.height !== down) image = context.createImageData(across, down);
  const pixels = new Uint32Array(image.data.buffer);
  pixels.fill(0);
  const side = Math.max(1, Math.round(size * ratio)), strength = answers.size ? 70 : 130;
  const scale = view.scale * ratio;
  const dx = across / 2 - view.x * scale - side / 2, dy = down / 2 - view.y * scale - side / 2;
  points.within(...frame, (i) => {
    const left = Math.round(x[i] * scale + dx), top = Math.round(y[i] * scale + dy);
    if (left < 0 || top < 0 || left + side > across || top + side > down) return;
    for (let row = top; row < top + side; row++) {
      for (let place = row * across + left, end = place + side; place < end; place++) {
        pixels[place] = dust | (Math.min(255, (pixels[place] >>> 24) + strength) << 24);
      }
    }
  });
  context.putImageData(image, 0, 0);
}

/** Fewer points, as round as they should be. */
function paintDots(frame, size) {
  const { x, y } = points;
  context.fillStyle = colours.edge;
  context.globalAlpha = answers.size ? 0.65 : 0.8;
  context.beginPath();
  points.within(...frame, (i) => {
    if (answers.has(i)) return;
    const [px, py] = view.pixel(x[i], y[i]);
    context.moveTo(px + size / 2, py);
    context.arc(px, py, size / 2, 0, 7);
  });
  context.fill();
  context.globalAlpha = 1;
}

/** The names of all points, where there are few. */
function paintNames(frame, size) {
  const seen = [];
  points.within(...frame, (i) => {
    const [px, py] = view.pixel(points.x[i], points.y[i]);
    if (px >= 0 && py >= 0 && px <= view.width && py <= view.height && !answers.has(i)) seen.push(i);
  });
  if (seen.length <= MOST_LABELS) for (const i of seen) label(i, colours.soft, size / 2, named);
}

/** How much a point stands out, from 0 to 1. */
const weight = (one) => (one.known ? 0.55 : Math.sqrt(one.strength));
const radius = (one, size) => Math.max(2, size / 2 + 1) + 5 * weight(one);

function paintAnswers(size) {
  const ordered = [...answers.values()].sort((a, b) => weight(a) - weight(b)); // the best are drawn last, over the others
  for (const one of ordered) {
    const [px, py] = view.pixel(points.x[one.id], points.y[one.id]);
    const strength = weight(one);
    context.globalAlpha = one.known ? 0.9 : 0.18 + 0.82 * strength;
    context.fillStyle = one.known ? colours.ink : colours["believed-bar"];
    context.beginPath();
    context.arc(px, py, radius(one, size), 0, 7);
    context.fill();
    if (strength < 0.4) continue;
    context.globalAlpha = 1;
    context.strokeStyle = colours.surface;
    context.lineWidth = 1;
    context.stroke();
  }
  context.globalAlpha = 1;
  named = [];
  if (asked >= 0) {
    ring(asked, colours.focus, size / 2 + 6);
    label(asked, colours.focus, size / 2 + 7, named);
  }
  for (const one of [...answers.values()].filter((one) => one.strength > 0.15).slice(0, LABELLED)) label(one.id, colours.ink, radius(one, size), named);
}

function ring(i, stroke, radius) {
  const [px, py] = view.pixel(points.x[i], points.y[i]);
  context.beginPath();
  context.arc(px, py, radius, 0, 7);
  context.strokeStyle = stroke;
  context.lineWidth = 2;
  context.stroke();
}

/** A name beside its point, to the left where the window ends, unless another is there already. */
function label(i, fill, apart, taken) {
  const [px, py] = view.pixel(points.x[i], points.y[i]);
  if (px < -50 || py < -20 || px > view.width || py > view.height + 20) return;
  const text = short(labels[i]);
  context.font = "500 12px system-ui, sans-serif";
  const width = context.measureText(text).width;
  const left = px + apart + 3 + width > view.width && px <= view.width ? px - apart - 3 - width : px + apart + 3;
  const box = [left, py - 8, left + width + 3, py + 8];
  if (taken.some(([l, t, r, b]) => box[0] < r && box[2] > l && box[1] < b && box[3] > t)) return;
  taken.push(box);
  context.lineWidth = 3;
  context.lineJoin = "round";
  context.strokeStyle = colours.surface;
  context.fillStyle = fill;
  context.textBaseline = "middle";
  context.strokeText(text, box[0], py);
  context.fillText(text, box[0], py);
}

function short(name) {
  const letters = [...shown(name)];
  return letters.length > 32 ? `${letters.slice(0, 31).join("")}…` : letters.join("");
}

// --- Pointing ------------------------------------------------------------------------------------------------------

function at(px, py) {
  if (!points) return -1;
  const [x, y] = view.place(px, py);
  return points.nearest(x, y, REACH / view.scale, (i) => answers.has(i) || i === asked);
}

function hover(px, py) {
  const found = px === null ? -1 : at(px, py);
  if (found === over && found < 0) return;
  point(found);
}

/** Name a point, on the map and in the list. */
function point(i, { held = false } = {}) {
  over = i;
  canvas.classList.toggle("over", i >= 0);
  for (const item of document.querySelectorAll(".found .here")) item.classList.remove("here");
  tip.hidden = i < 0;
  tip.classList.toggle("held", held);
  if (i >= 0) {
    const one = answers.get(i);
    const name = held
      ? element("a", { dir: "auto", href: entityAddress(names[i]) }, shown(labels[i]))
      : element("span", { dir: "auto" }, shown(labels[i]));
    tip.replaceChildren(name, ...(one ? [element("span", { class: "soft" }, ` ${sure(one)}`)] : []));
    one?.item?.classList.add("here");
    const [px, py] = view.pixel(points.x[i], points.y[i]);
    const left = Math.max(4, Math.min(px + 12, view.width - tip.offsetWidth - 4));
    const top = py + 14 + tip.offsetHeight > view.height ? py - 14 - tip.offsetHeight : py + 14;
    tip.style.transform = `translate(${left}px, ${Math.max(4, top)}px)`;
  }
  paintSoon();
}

/** A click opens the page of what is there; a finger, which cannot hover, first sees its name as a link. */
function open(px, py, { touch, apart }) {
  const i = at(px, py);
  if (touch) point(i, { held: true });
  else if (i >= 0 && apart) window.open(entityAddress(names[i]), "_blank", "noopener");
  else if (i >= 0) location.assign(entityAddress(names[i]));
}

// --- A question ----------------------------------------------------------------------------------------------------

const sure = (one) => (one.known ? "known" : one.probability === null ? `score ${one.score.toFixed(2)}` : percent(one.probability));

async function colourBy(entity, relation, wanted) {
  const choices = { find: wanted, relation, k: MOST_ANSWERS, [wanted === "tail" ? "head" : "tail"]: entity };
  try {
    const found = await ask("/ask.json", choices);
    const given = found.question.head ?? found.question.tail;
    asked = given.id;
    const best = Math.max(0.002, ...found.answers.map((one) => one.probability ?? 0));
    const weighed = found.answers.map((one, rank) => ({ ...one, strength: strength(one, best, rank) }));
    const fresh = weighed.sort((a, b) => (b.probability ?? 0) - (a.probability ?? 0));
    const known = found.known.map((one) => ({ ...one, strength: 1 }));
    answers = new Map([...fresh, ...known].map((one) => [one.id, one]));
    const parts = [element("bdi", {}, short(given.label)), ", ", element("bdi", { class: "relation" }, short(spoken(found.question.relation.label)))];
    said.replaceChildren(...(wanted === "tail" ? [...parts, ", ?"] : ["?, ", parts[2], ", ", parts[0]]), ` · ${fresh.length} new, ${known.length} known`);
    legend.hidden = false;
    find("map-does=answers").hidden = false;
    list.replaceChildren(...fresh.map(listed));
    knownList.replaceChildren(...known.map(listed));
    folded.hidden = !known.length;
    folded.querySelector("summary").textContent = known.length === 1 ? "1 known answer" : `${known.length} known answers`;
    paintSoon();
  } catch (error) {
    complain(said, error);
  }
}

/** From 0 to 1; without probabilities, by rank. */
function strength(one, best, rank) {
  return one.probability === null ? 1 / (1 + rank / 5) : one.probability / best;
}

function listed(one) {
  const link = element("a", { class: "name", dir: "auto", href: entityAddress(one.name) }, short(one.label));
  one.item = element(
    "li",
    { class: one.known ? "known" : null, onpointerenter: () => point(one.id), onpointerleave: () => point(-1), onfocusin: () => { view.show(points.x[one.id], points.y[one.id]); point(one.id); } },
    link,
    element("span", { class: "percent" }, sure(one)),
    one.known || one.probability === null ? null : bar(one.probability),
  );
  return one.item;
}

// --- Beginning -----------------------------------------------------------------------------------------------------

/** Made when it is first asked for, which may take minutes: until then it is asked for again and again. */
async function load() {
  const late = setTimeout(() => { veil.textContent = SLOW; }, 2000);
  for (;;) {
    const found = await ask("/api/map").finally(() => clearTimeout(late));
    if (found.x) return found;
    veil.textContent = found.sentence;
    await new Promise((later) => setTimeout(later, PAUSE));
  }
}

async function begin() {
  const [field, relation] = [form.elements.entity, form.elements.relation];
  const relations = [...form.querySelectorAll("#relations option")].map((option) => ({ name: option.value, label: option.label || option.value }));
  const submit = () => { if (meant(field) && meant(relation)) form.requestSubmit(); else (meant(field) ? relation : field).focus(); };
  combobox(field, { find: findEntities(), onPick: submit });
  const choosing = combobox(relation, { find: findAmong(relations), onPick: submit, wait: 0 });
  relation.addEventListener("focus", () => { if (!relation.value) choosing.open(); });
  form.addEventListener("change", (event) => { if (event.target.name === "find" && meant(field) && meant(relation)) form.requestSubmit(); });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!meant(field) || !meant(relation)) return submit();
    const choices = { entity: meant(field), relation: meant(relation), find: form.elements.find.value };
    history.replaceState(null, "", address("/map", choices));
    return colourBy(choices.entity, choices.relation, choices.find);
  });
  readColours();
  onTheme(readColours);
  try {
    const found = await load();
    points = new Points(found.x, found.y);
    names = found.names;
    labels = found.labels ?? found.names;
    veil.hidden = true;
    canvas.dataset.ready = points.length;
  } catch (error) {
    complain(veil, error);
    return;
  }
  view.fit();
  if (meant(field) && meant(relation)) await colourBy(meant(field), meant(relation), form.elements.find.value);
  else said.textContent = "Choose an entity and a relation to colour the map.";
}

/** The question and what was answered with some belief, as large as the window allows. */
function frameAnswers() {
  const ids = [...answers.values()].filter((one) => one.known || one.strength > 0.15).map((one) => one.id);
  if (points && asked >= 0) view.frame([asked, ...ids].map((id) => [points.x[id], points.y[id]]));
}

for (const button of document.querySelectorAll("[data-map-does]")) {
  const does = { in: () => view.zoomBy(1.8), out: () => view.zoomBy(1 / 1.8), all: () => view.fit({ slowly: true }), answers: frameAnswers };
  button.addEventListener("click", does[button.dataset.mapDoes]);
}

begin();
