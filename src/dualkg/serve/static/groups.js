// The colours of all entities of the map: by type, commonest relation, degree, or community.

import { element, isDark } from "./common.js";

// Of Okabe and Ito, which the colour-blind can tell apart; the last is for all others.
const HUES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a900"];
const DEGREES = [1, 3, 10, 30, 100, 300]; // the first of each group but the first
const MIN_CELLS = 8; // of the map along an axis
// Points in a cell of the map on average: there are more names than colours.
const NAMED = 2;
const COLOURED = 12;
const MIN_COMMUNITY = 5; // points of a part of the map that has a name
const MAX_NAME = 40; // characters

export class Groups {
  /** `of` has the group of each entity, `names` those of the groups; a last group has the rest. */
  constructor(of, names, rest, hues = HUES) {
    this.of = of;
    this.names = names;
    this.colours = [...names.map((_, number) => hues[number]), rest];
    this.packed = this.colours.map(packed);
  }

  static by(property, map, points) {
    const rest = isDark() ? "#6b655c" : "#a79f93";
    if (property === "degree") return byDegree(map.degrees, rest);
    if (property === "community") return byPlace(map, points, rest);
    if (property === "type") return byNumber(map.types, map.type_names, rest);
    return byNumber(map.roles, map.role_names, rest);
  }

  /** Items of a list that explains the colours. */
  legend() {
    const names = [...this.names];
    if (this.of.includes(names.length)) names.push("others");
    return names.map((name, number) => {
      const dot = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      dot.setAttribute("viewBox", "0 0 2 2");
      dot.setAttribute("aria-hidden", "true");
      const disc = document.createElementNS("http://www.w3.org/2000/svg", "circle");
      for (const key of ["cx", "cy", "r"]) disc.setAttribute(key, 1);
      disc.setAttribute("fill", this.colours[number]);
      dot.append(disc);
      return element("li", {}, dot, ` ${name}`);
    });
  }
}

/** By a number of each entity, or −1; the first names have colours. */
function byNumber(numbers, allNames, rest) {
  const names = allNames.slice(0, HUES.length).map((name) => name.slice(0, MAX_NAME));
  const of = Uint8Array.from(numbers, (number) => {
    return number >= 0 && number < names.length ? number : names.length;
  });
  return new Groups(of, names, rest);
}

/** From few triples to many, pale to strong. */
function byDegree(degrees, rest) {
  const hues = isDark()
    ? ["#3d4a5c", "#47658a", "#4f82b8", "#62a3e0", "#93c3f0", "#c5e0fa", "#ffffff"]
    : ["#c9d8e8", "#9fbfde", "#74a3d0", "#4a86bd", "#2a68a0", "#154a7a", "#052a4d"];
  const names = ["0", ...DEGREES].map((first, number) => {
    if (!number) return "no triple";
    const next = DEGREES[number];
    if (!next) return `${first} and more`;
    return next === first + 1 ? String(first) : `${first} to ${next - 1}`;
  });
  const of = Uint8Array.from(degrees, (degree) => {
    const number = DEGREES.findIndex((first) => degree < first);
    return number < 0 ? DEGREES.length : number;
  });
  return new Groups(of, names, rest, hues);
}

/**
 * Communities: the densest parts of the map, each with the points that lead to it uphill.
 *
 * Points are counted in the cells of a grid; a cell leads to its fullest neighbour. `peaks` has the
 * community of each point; `sizes` and `hubs`, its entity of the highest degree, are by community.
 */
function communities(map, points, perCell) {
  const size = Math.max(MIN_CELLS, Math.min(96, Math.round(Math.sqrt(points.length / perCell))));
  const cell = (v) => Math.max(0, Math.min(size - 1, Math.floor(((v + 1) / 2) * size)));
  const cells = Uint32Array.from(points.x, (x, i) => cell(points.y[i]) * size + cell(x));
  const counts = smoothed(cells, size);
  const top = new Int32Array(size * size).fill(-1);
  const climb = (start) => {
    const path = [];
    let place = start;
    while (top[place] < 0) {
      path.push(place);
      const next = fullest(place, counts, size);
      if (next === place) {
        top[place] = place;
        break;
      }
      place = next;
    }
    for (const one of path) top[one] = top[place];
    return top[place];
  };
  const peaks = Int32Array.from(cells, climb);
  const sizes = new Map();
  const hubs = new Map(); // the entity of the highest degree of each
  peaks.forEach((peak, i) => {
    sizes.set(peak, (sizes.get(peak) ?? 0) + 1);
    if (!hubs.has(peak) || map.degrees[i] > map.degrees[hubs.get(peak)]) hubs.set(peak, i);
  });
  const ordered = [...sizes.keys()].sort((a, b) => sizes.get(b) - sizes.get(a));
  return { peaks, sizes, hubs, ordered };
}

/** The entity of the highest degree in each part of the map, the largest part first. */
export function hubs(map, points) {
  const found = communities(map, points, NAMED);
  const large = found.ordered.filter((peak) => found.sizes.get(peak) >= MIN_COMMUNITY);
  return large.map((peak) => found.hubs.get(peak));
}

function byPlace(map, points, rest) {
  const { peaks, sizes, hubs, ordered } = communities(map, points, COLOURED);
  const largest = ordered.slice(0, HUES.length);
  const numbers = new Map(largest.map((peak, number) => [peak, number]));
  const of = Uint8Array.from(peaks, (peak) => numbers.get(peak) ?? largest.length);
  const labels = map.labels ?? map.names;
  const names = largest.map((peak) => {
    const others = (sizes.get(peak) - 1).toLocaleString("en");
    return `${labels[hubs.get(peak)].slice(0, MAX_NAME)} and ${others} more`;
  });
  return new Groups(of, names, rest);
}

/** The number of points in each cell and, with less weight, around it. */
function smoothed(cells, size) {
  const counts = new Float32Array(size * size);
  for (const place of cells) counts[place]++;
  return counts.map((_, place) => {
    let sum = 0;
    for (const near of neighbours(place, size)) sum += near === place ? 2 * counts[near] : counts[near];
    return sum;
  });
}

function fullest(place, counts, size) {
  let best = place;
  for (const near of neighbours(place, size)) if (counts[near] > counts[best]) best = near;
  return best;
}

function neighbours(place, size) {
  const row = Math.floor(place / size);
  const column = place % size;
  const found = [];
  for (let r = Math.max(0, row - 1); r <= Math.min(size - 1, row + 1); r++) {
    for (let c = Math.max(0, column - 1); c <= Math.min(size - 1, column + 1); c++) {
      found.push(r * size + c);
    }
  }
  return found;
}

/** A colour as the lower three bytes of a pixel. */
function packed(hex) {
  const value = Number.parseInt(hex.slice(1), 16);
  return (value >> 16) | (value & 0xff00) | ((value & 0xff) << 16);
}
