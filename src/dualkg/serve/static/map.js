// The map: drawn on a canvas, moved by mouse, finger and keys, coloured by the predictions of a query.

import {
  address,
  colour,
  combobox,
  element,
  entityAddress,
  findAmong,
  findEntities,
  nameIn,
  offeredRelations,
  onTheme,
  requestElement,
  requestJson,
  showError,
} from "./common.js";
import "./decide.js";
import { Groups, hubs } from "./groups.js";
import { Points } from "./points.js";
import { View } from "./view.js";

const LABELLED = 12; // predictions whose names are drawn
const LANDMARKS = 30; // entities of high degree whose names are drawn while there is no query
const MAX_TRIED = 120; // entities in view whose names are tried
const MAX_LISTED = 200; // entities of a lasso
const FOCUS_ZOOM = 12; // at which a chosen entity is shown, relative to the whole map
const VIEW_DELAY = 300; // milliseconds after a movement until the view is in the address
const MAX_LABELS = 80; // names of other points
const MAX_LABEL_LENGTH = 32;
const MANY = 4000; // points; more are drawn as pixels
const REACH = 14; // pixels
const POINTS_PER_SECOND = 40_000; // of positions so far that are sent
const WAIT = 1; // seconds in which a map that is being computed is waited for
const find = (name) => document.querySelector(`[data-${name}]`);
const canvas = find("canvas");
const veil = find("veil");
const loading = find("loading");
const tip = find("tip");
const legend = find("legend");
const message = find("message");
const list = find("found");
const form = find("query");
const folded = find("folded");
const knownList = folded.querySelector("ol");
const context = canvas.getContext("2d");

let map = null; // what the server says of all entities
let points = null;
let names = [];
let labels = [];
let predictions = new Map(); // by id: {id, known, strength, item}
let given = -1; // the id of the query's entity
let over = -1; // the id of the point under the pointer
const colours = {};
let dust = 0; // the colour of many points
let image = null;
let labelled = []; // boxes of the names that are drawn
let groups = null; // the colours of all entities
let landmarks = []; // ids in the order in which their names are tried: one of each part comes first
let lasso = null; // the pixels of a line that is being drawn

const view = new View(canvas, { changed: paintSoon, tapped: open, hovered: hover });

// --- Drawing -------------------------------------------------------------------------------------

let painting = 0;
let isDrawn = false; // the time of the first picture is a mark, for tests and developers' tools

function paintSoon() {
  rememberView();
  painting ||= requestAnimationFrame(() => {
    painting = 0;
    paint();
    if (points && !isDrawn) performance.mark("map drawn");
    isDrawn ||= Boolean(points);
  });
}

function readColours() {
  for (const name of ["ink", "edge", "soft", "predicted-bar", "focus", "surface"]) {
    colours[name] = colour(`--${name}`);
  }
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
  const frame = [...view.position(0, 0), ...view.position(width, height)];
  const shrink = Math.min(1.4, Math.sqrt(2000 / Math.max(points.length, 200)));
  const number = points.count(...frame);
  const least = number > MANY ? 1.6 : 2.6;
  const size = Math.max(least, Math.min(7, 3.2 * shrink * Math.sqrt(scale / view.fitting)));
  if (number > MANY) paintDust(frame, size);
  else paintDots(frame, size);
  paintPredictions(size);
  if (number <= 4 * MAX_LABELS) paintNames(frame, size);
  else if (!predictions.size) paintLandmarks(size);
  paintLasso();
  if (over >= 0) ring(over, colours.ink, Math.max(size / 2, 3) + 3);
}

/** Many points as pixels of an image, which is darker where they are dense. */
function paintDust(frame, size) {
  const { width: across, height: down } = canvas;
  const { x, y } = points;
  if (image?.width !== across || image.height !== down) {
    image = context.createImageData(across, down);
  }
  const pixels = new Uint32Array(image.data.buffer);
  pixels.fill(0);
  const side = Math.max(1, Math.round(size * view.ratio));
  const strength = predictions.size ? 70 : 130;
  const scale = view.scale * view.ratio;
  const dx = across / 2 - view.x * scale - side / 2;
  const dy = down / 2 - view.y * scale - side / 2;
  points.within(...frame, (i) => {
    const left = Math.round(x[i] * scale + dx);
    const top = Math.round(y[i] * scale + dy);
    if (left < 0 || top < 0 || left + side > across || top + side > down) return;
    const hue = groups ? groups.packed[groups.of[i]] : dust;
    for (let row = top; row < top + side; row++) {
      for (let place = row * across + left, end = place + side; place < end; place++) {
        pixels[place] = hue | (Math.min(255, (pixels[place] >>> 24) + strength) << 24);
      }
    }
  });
  context.putImageData(image, 0, 0);
}

/** Fewer points as discs. */
function paintDots(frame, size) {
  const { x, y } = points;
  context.globalAlpha = predictions.size ? 0.65 : 0.8;
  const paths = new Map(); // by colour
  points.within(...frame, (i) => {
    if (predictions.has(i)) return;
    const fill = groups ? groups.colours[groups.of[i]] : colours.edge;
    if (!paths.has(fill)) paths.set(fill, new Path2D());
    const path = paths.get(fill);
    const [px, py] = view.pixel(x[i], y[i]);
    path.moveTo(px + size / 2, py);
    path.arc(px, py, size / 2, 0, 7);
  });
  for (const [fill, path] of paths) {
    context.fillStyle = fill;
    context.fill(path);
  }
  context.globalAlpha = 1;
}

/** The names of all points in view, if there are few. */
function paintNames(frame, size) {
  const seen = [];
  points.within(...frame, (i) => {
    const [px, py] = view.pixel(points.x[i], points.y[i]);
    const isInView = px >= 0 && py >= 0 && px <= view.width && py <= view.height;
    if (isInView && !predictions.has(i)) seen.push(i);
  });
  if (seen.length > MAX_LABELS) return;
  for (const i of seen) label(i, colours.soft, size / 2, labelled);
}

/** Names of the parts of the map, and of entities of high degree in view, as far as there is room. */
function paintLandmarks(size) {
  let tried = 0;
  for (const i of landmarks) {
    if (labelled.length >= LANDMARKS || tried >= MAX_TRIED) return;
    const [px, py] = view.pixel(points.x[i], points.y[i]);
    if (px < 0 || py < 0 || px > view.width || py > view.height) continue;
    tried++;
    label(i, colours.ink, size / 2, labelled);
  }
}

function paintLasso() {
  if (!lasso) return;
  context.beginPath();
  for (const [px, py] of lasso) context.lineTo(px, py);
  context.closePath();
  context.strokeStyle = colours.focus;
  context.lineWidth = 2;
  context.stroke();
}

/** How much a point stands out, from 0 to 1. */
const weight = (prediction) => (prediction.known ? 0.55 : Math.sqrt(prediction.strength));
const radius = (prediction, size) => Math.max(2, size / 2 + 1) + 5 * weight(prediction);

function paintPredictions(size) {
  // The best are drawn last, on top.
  const ordered = [...predictions.values()].sort((a, b) => weight(a) - weight(b));
  for (const prediction of ordered) {
    const [px, py] = view.pixel(points.x[prediction.id], points.y[prediction.id]);
    const strength = weight(prediction);
    context.globalAlpha = prediction.known ? 0.9 : 0.18 + 0.82 * strength;
    context.fillStyle = prediction.known ? colours.ink : colours["predicted-bar"];
    context.beginPath();
    context.arc(px, py, radius(prediction, size), 0, 7);
    context.fill();
    if (strength < 0.4) continue;
    context.globalAlpha = 1;
    context.strokeStyle = colours.surface;
    context.lineWidth = 1;
    context.stroke();
  }
  context.globalAlpha = 1;
  labelled = [];
  if (given >= 0) {
    ring(given, colours.focus, size / 2 + 6);
    label(given, colours.focus, size / 2 + 7, labelled);
  }
  const strong = [...predictions.values()].filter((prediction) => prediction.strength > 0.15);
  for (const prediction of strong.slice(0, LABELLED)) {
    label(prediction.id, colours.ink, radius(prediction, size), labelled);
  }
}

function ring(i, stroke, radius) {
  const [px, py] = view.pixel(points.x[i], points.y[i]);
  context.beginPath();
  context.arc(px, py, radius, 0, 7);
  context.strokeStyle = stroke;
  context.lineWidth = 2;
  context.stroke();
}

/** A name next to its point, to the left at the end of the window, unless it would cover another. */
function label(i, fill, apart, taken) {
  const [px, py] = view.pixel(points.x[i], points.y[i]);
  if (px < -50 || py < -20 || px > view.width || py > view.height + 20) return;
  const text = short(labels[i]);
  context.font = "500 12px system-ui, sans-serif";
  const width = context.measureText(text).width;
  const gap = apart + 3;
  const fitsRight = px + gap + width <= view.width || px > view.width;
  const left = fitsRight ? px + gap : px - gap - width;
  const box = [left, py - 8, left + width + 3, py + 8];
  if (taken.some((other) => overlap(box, other))) return;
  taken.push(box);
  context.lineWidth = 3;
  context.lineJoin = "round";
  context.strokeStyle = colours.surface;
  context.fillStyle = fill;
  context.textBaseline = "middle";
  context.strokeText(text, box[0], py);
  context.fillText(text, box[0], py);
}

/** Whether two boxes [left, top, right, bottom] have points in common. */
function overlap(box, other) {
  const [left, top, right, bottom] = other;
  return box[0] < right && box[2] > left && box[1] < bottom && box[3] > top;
}

function short(text) {
  const letters = [...text];
  if (letters.length <= MAX_LABEL_LENGTH) return text;
  return `${letters.slice(0, MAX_LABEL_LENGTH - 1).join("")}…`;
}

// --- Pointing ------------------------------------------------------------------------------------

function at(px, py) {
  if (!points) return -1;
  const [x, y] = view.position(px, py);
  return points.nearest(x, y, REACH / view.scale, (i) => predictions.has(i) || i === given);
}

function hover(px, py) {
  const found = px === null ? -1 : at(px, py);
  if (found === over && found < 0) return;
  point(found);
}

/** Highlight a point, on the map and in the list. */
function point(i, { held = false } = {}) {
  over = i;
  canvas.classList.toggle("over", i >= 0);
  for (const item of document.querySelectorAll(".found .here")) item.classList.remove("here");
  tip.hidden = i < 0;
  tip.classList.toggle("held", held);
  if (i >= 0) showTip(i, held);
  paintSoon();
}

/** The name of a point, as a link if `held`, and its certainty if it is a prediction. */
function showTip(i, held) {
  const name = held
    ? element("a", { dir: "auto", href: entityAddress(names[i]) }, labels[i])
    : element("span", { dir: "auto" }, labels[i]);
  tip.replaceChildren(name);
  const prediction = predictions.get(i);
  if (prediction) {
    // After the figure, its link says what it opens.
    const figure = prediction.item.querySelector(".certainty > :last-child").firstChild;
    tip.append(element("span", { class: "soft" }, ` ${figure.textContent}`));
    prediction.item.classList.add("here");
  }
  const [px, py] = view.pixel(points.x[i], points.y[i]);
  const left = Math.max(4, Math.min(px + 12, view.width - tip.offsetWidth - 4));
  const fitsBelow = py + 14 + tip.offsetHeight <= view.height;
  const top = fitsBelow ? py + 14 : py - 14 - tip.offsetHeight;
  tip.style.transform = `translate(${left}px, ${Math.max(4, top)}px)`;
}

/** A click opens the page of an entity; a touch, which cannot hover, first shows its name as a link. */
function open(px, py, { touch, apart }) {
  const i = at(px, py);
  if (touch) point(i, { held: true });
  else if (i >= 0 && apart) window.open(entityAddress(names[i]), "_blank", "noopener");
  else if (i >= 0) location.assign(entityAddress(names[i]));
}

// --- An entity, colours, a lasso, the view -------------------------------------------------------

/** Mark an entity and move to it. */
function focusOn(name) {
  const i = points ? names.indexOf(name) : -1;
  if (i < 0) return;
  given = i;
  view.centre(points.x[i], points.y[i], FOCUS_ZOOM);
}

/** Colour all entities by one of their properties. */
function colourAll(by) {
  groups = by ? Groups.by(by, map, points) : null;
  const place = find("groups");
  place.hidden = !groups;
  place.replaceChildren(...(groups ? groups.legend() : []));
  find("colouring").value = by;
  rememberView();
  paintSoon();
}

/** The entities inside a line as a list, those of the highest degree first. */
function listInside(line) {
  const corners = line.map(([px, py]) => view.position(px, py));
  const inside = points.inside(corners).sort((a, b) => map.degrees[b] - map.degrees[a]);
  const rows = inside.slice(0, MAX_LISTED).map((i) => {
    const name = element("a", { class: "name", dir: "auto", href: entityAddress(names[i]) }, labels[i]);
    const item = element("li", {}, name, element("span", { class: "number soft" }, String(map.degrees[i])));
    item.addEventListener("pointerenter", () => point(i));
    item.addEventListener("pointerleave", () => point(-1));
    return item;
  });
  const count = inside.length.toLocaleString("en");
  const shown = inside.length > MAX_LISTED ? `; the ${MAX_LISTED} of the highest degree are listed` : "";
  message.textContent = `${count} entities are inside${shown}.`;
  predictions = new Map();
  legend.hidden = true;
  folded.hidden = true;
  find("map-does=answers").hidden = true;
  list.replaceChildren(...rows);
  paintSoon();
}

function listenToLasso() {
  const button = find("lasso");
  const set = (isOn) => {
    button.setAttribute("aria-pressed", String(isOn));
    canvas.classList.toggle("drawing", isOn);
    view.isHeld = isOn;
    lasso = null;
    paintSoon();
  };
  button.addEventListener("click", () => set(button.getAttribute("aria-pressed") !== "true"));
  canvas.addEventListener("pointerdown", (event) => {
    if (view.isHeld) lasso = [[event.offsetX, event.offsetY]];
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!lasso) return;
    lasso.push([event.offsetX, event.offsetY]);
    paintSoon();
  });
  canvas.addEventListener("pointerup", () => {
    if (!lasso) return;
    const line = lasso;
    set(false);
    if (line.length > 2 && points) listInside(line);
  });
}

let remembering = 0;

/** Put centre, zoom and colours behind # of the address, so that a link leads here. */
function rememberView() {
  if (!points) return;
  clearTimeout(remembering);
  remembering = setTimeout(() => {
    const numbers = [view.x, view.y, view.scale / view.fitting].map((n) => Number(n.toFixed(4)));
    const parts = [...numbers, find("colouring").value].join();
    const hash = parts === "0,0,1," ? "" : `#${parts}`;
    if (hash !== location.hash) history.replaceState(null, "", location.pathname + location.search + hash);
  }, VIEW_DELAY);
}

/** The view of the address; whether it had one. */
function recallView() {
  const [x, y, zoom, by = ""] = location.hash.slice(1).split(",");
  const numbers = [x, y, zoom].map(Number);
  if (!zoom || !numbers.every(Number.isFinite)) return false;
  colourAll([...find("colouring").options].some((option) => option.value === by) ? by : "");
  view.centre(numbers[0], numbers[1], numbers[2], { animated: false });
  return true;
}

// --- A query -------------------------------------------------------------------------------------

async function colourBy(params) {
  try {
    const found = await requestElement(address("/map/predictions", params), "[data-predictions]");
    const [sentence, fresh, known] = found.children;
    given = Number(found.dataset.id);
    const rows = [...fresh.children, ...known.children].map(listed);
    predictions = new Map(rows.map((prediction) => [prediction.id, prediction]));
    message.replaceChildren(...sentence.childNodes);
    legend.hidden = false;
    find("map-does=answers").hidden = false;
    const numKnown = known.childElementCount;
    folded.hidden = !numKnown;
    const summary = numKnown === 1 ? "1 known answer" : `${numKnown} known answers`;
    folded.querySelector("summary").textContent = summary;
    list.replaceChildren(...fresh.children);
    knownList.replaceChildren(...known.children);
    paintSoon();
  } catch (error) {
    showError(message, error);
  }
}

/** A row of the list, connected with its point. */
function listed(item) {
  const id = Number(item.dataset.id);
  item.addEventListener("pointerenter", () => point(id));
  item.addEventListener("pointerleave", () => point(-1));
  item.addEventListener("focusin", () => {
    view.show(points.x[id], points.y[id]);
    point(id);
  });
  const known = item.classList.contains("known");
  const prediction = { id, known, strength: Number(item.dataset.strength), item };
  // An accepted answer is drawn as a known one, and a rejected one as if it were improbable.
  item.addEventListener("decided", ({ detail: verdict }) => {
    prediction.known = known || verdict === "accepted";
    prediction.strength = verdict === "rejected" ? 0 : Number(item.dataset.strength);
    paintSoon();
  });
  return prediction;
}

// --- Start ---------------------------------------------------------------------------------------

/**
 * The map is computed on the first request, which may take minutes; until then the page polls.
 *
 * The server stops soon after nobody polls. The result is null once the reader has stopped.
 */
async function load() {
  let isKnown = false; // whether the names are here
  const progress = find("progress");
  const stop = find("stop");
  let stopped = false;
  stop.addEventListener("click", () => {
    stopped = true;
    stop.hidden = true;
    progress.hidden = true;
    const again = element("a", { href: location.href }, "Continue");
    loading.replaceChildren("The map is not computed any further. ", again);
  });
  while (!stopped) {
    const reply = await requestJson(address("/api/map", { wait: WAIT, so_far: isKnown ? "positions" : "all" }));
    if (reply.x) return reply;
    if (stopped) break;
    loading.textContent = reply.so_far ? `${reply.message} Its points move until then.` : reply.message;
    stop.hidden = false;
    progress.hidden = false;
    progress.value = reply.done ?? 0;
    if (reply.so_far) {
      place(reply.so_far);
      isKnown = true;
      veil.classList.add("strip");
      canvas.dataset.soFar = points.length;
    }
    const pause = 1000 * Math.max(WAIT, (points?.length ?? 0) / POINTS_PER_SECOND);
    await new Promise((resume) => setTimeout(resume, pause));
  }
  return null;
}

/** Draw positions, those so far or the last ones; the view stays as it is once there was a picture. */
function place(positions) {
  const isFirst = !points;
  map = { ...map, ...positions };
  points = new Points(map.x, map.y);
  names = map.names;
  labels = map.labels ?? map.names;
  const byDegree = Array.from(map.degrees.keys()).sort((a, b) => map.degrees[b] - map.degrees[a]);
  landmarks = [...new Set([...hubs(map, points), ...byDegree])];
  if (isFirst) {
    listenToLasso();
    find("colouring").addEventListener("change", (event) => colourAll(event.target.value));
    if (!recallView()) view.fit();
    if (nameIn(field) && !isComplete()) focusOn(nameIn(field));
  } else if (groups) colourAll(find("colouring").value);
  paintSoon();
}

const field = form.elements.entity;
const relation = form.elements.relation;

/** The parameters of the query in the form. */
function query() {
  return { entity: nameIn(field), relation: nameIn(relation), find: form.elements.find.value };
}

function isComplete() {
  return nameIn(field) && nameIn(relation);
}

/** Send the query, or focus the field that is empty. */
function submit() {
  if (isComplete()) form.requestSubmit();
  else if (nameIn(field)) relation.focus();
  else field.focus();
}

function listenToForm() {
  combobox(field, {
    find: findEntities(),
    onPick: () => {
      focusOn(nameIn(field));
      submit();
    },
  });
  const relations = findAmong(offeredRelations(form));
  const choosing = combobox(relation, { find: relations, onPick: submit, wait: 0 });
  relation.addEventListener("focus", () => {
    if (!relation.value) choosing.open();
  });
  form.addEventListener("change", (event) => {
    if (event.target.name === "find" && isComplete()) form.requestSubmit();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!isComplete()) return submit();
    history.replaceState(null, "", address("/map", query()));
    return colourBy(query());
  });
}

async function start() {
  veil.hidden = false;
  listenToForm();
  readColours();
  onTheme(() => {
    readColours();
    if (groups) colourAll(find("colouring").value);
  });
  try {
    const final = await load();
    if (!final) return;
    place(final);
    veil.hidden = true;
    canvas.dataset.ready = points.length;
  } catch (error) {
    find("stop").hidden = true;
    find("progress").hidden = true;
    showError(loading, error);
    return;
  }
  if (isComplete()) await colourBy(query());
  else message.textContent = "Choose an entity and a relation to colour the map.";
}

/** Zoom to the query's entity and its stronger predictions. */
function framePredictions() {
  if (!points || given < 0) return;
  const isStrong = (prediction) => prediction.known || prediction.strength > 0.15;
  const strong = [...predictions.values()].filter(isStrong);
  const ids = [given, ...strong.map((prediction) => prediction.id)];
  view.frame(ids.map((id) => [points.x[id], points.y[id]]));
}

const actions = {
  in: () => view.zoomBy(1.8),
  out: () => view.zoomBy(1 / 1.8),
  all: () => view.fit({ animated: true }),
  answers: framePredictions,
};
for (const button of document.querySelectorAll("[data-map-does]")) {
  button.addEventListener("click", actions[button.dataset.mapDoes]);
}

start();
