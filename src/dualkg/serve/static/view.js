// A window onto a plane: where its middle is, how near it is, and how mouse, fingers and keys move it.

const FURTHEST = 0.5, NEAREST = 400; // as often as large as when all of it is seen
const EASE = 180; // milliseconds
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class View {
  x = 0;
  y = 0;
  scale = 1; // pixels of one unit
  fitting = 1;
  width = 1;
  height = 1;
  ratio = 1;
  #canvas;
  #told;
  #pointers = new Map();
  #moved = 0;
  #flight = 0;

  /** `changed()` when something is to be drawn again; `tapped(x, y, how)` and `hovered(x or null, y)` in pixels. */
  constructor(canvas, { changed, tapped, hovered }) {
    this.#canvas = canvas;
    this.#told = { changed, tapped, hovered };
    new ResizeObserver(() => this.#resize()).observe(canvas);
    this.#listen();
  }

  place(px, py) {
    return [(px - this.width / 2) / this.scale + this.x, (py - this.height / 2) / this.scale + this.y];
  }

  pixel(x, y) {
    return [(x - this.x) * this.scale + this.width / 2, (y - this.y) * this.scale + this.height / 2];
  }

  /** All of it, from −1 to 1. */
  fit({ slowly = false } = {}) {
    this.#go({ x: 0, y: 0, scale: this.fitting }, slowly);
  }

  /** Some places, with a margin around them. */
  frame(places) {
    const [xs, ys] = [0, 1].map((axis) => places.map((place) => place[axis]));
    const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const scale = Math.min(this.width / (right - left || 0.01), this.height / (bottom - top || 0.01)) * 0.8;
    this.#go({ x: (left + right) / 2, y: (top + bottom) / 2, scale: this.#held(scale) }, true);
  }

  zoomBy(factor) {
    this.#go({ x: this.x, y: this.y, scale: this.#held(this.scale * factor) }, true);
  }

  panBy(px, py) {
    this.#go({ x: this.x + px / this.scale, y: this.y + py / this.scale, scale: this.scale }, true);
  }

  /** Move no further than is needed to see a place. */
  show(x, y) {
    const [px, py] = this.pixel(x, y);
    const outside = px < 30 || py < 30 || px > this.width - 30 || py > this.height - 30;
    if (outside) this.#go({ x, y, scale: this.scale }, true);
  }

  #held(scale) {
    return Math.max(this.fitting * FURTHEST, Math.min(this.fitting * NEAREST, scale));
  }

  /** At once, or in a short flight, which the next movement takes over. */
  #go(to, slowly) {
    cancelAnimationFrame(this.#flight);
    const from = { x: this.x, y: this.y, scale: this.scale }, started = performance.now();
    const fly = (now) => {
      const share = slowly && !still.matches ? Math.max(0, Math.min(1, (now - started) / EASE)) : 1;
      const eased = 1 - (1 - share) ** 3;
      this.scale = from.scale * (to.scale / from.scale) ** eased;
      this.x = from.x + (to.x - from.x) * eased;
      this.y = from.y + (to.y - from.y) * eased;
      this.#changed();
      if (share < 1) this.#flight = requestAnimationFrame(fly);
    };
    if (slowly && !still.matches) this.#flight = requestAnimationFrame(fly);
    else fly(started);
  }

  /** What is under a pixel stays there. */
  #zoomAt(px, py, factor) {
    cancelAnimationFrame(this.#flight);
    const [x, y] = this.place(px, py);
    this.scale = this.#held(this.scale * factor);
    this.x = x - (px - this.width / 2) / this.scale;
    this.y = y - (py - this.height / 2) / this.scale;
    this.#changed();
  }

  #changed() {
    this.x = Math.max(-1.5, Math.min(1.5, this.x));
    this.y = Math.max(-1.5, Math.min(1.5, this.y));
    this.#told.changed();
  }

  #resize() {
    const { clientWidth, clientHeight } = this.#canvas;
    const before = this.scale / this.fitting;
    this.ratio = Math.min(2, devicePixelRatio || 1);
    [this.width, this.height] = [clientWidth, clientHeight];
    this.#canvas.width = Math.round(clientWidth * this.ratio);
    this.#canvas.height = Math.round(clientHeight * this.ratio);
    this.fitting = Math.max(1, Math.min(clientWidth, clientHeight) / 2.12);
    this.scale = this.fitting * (before || 1);
    this.#changed();
  }

  #listen() {
    const canvas = this.#canvas, pointers = this.#pointers;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const lines = event.deltaMode === 1 ? 16 : 1;
      this.#zoomAt(event.offsetX, event.offsetY, Math.exp(-Math.max(-120, Math.min(120, event.deltaY * lines)) * (event.ctrlKey ? 0.01 : 0.0022)));
      this.#told.hovered(event.offsetX, event.offsetY);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button > 1) return;
      canvas.setPointerCapture(event.pointerId);
      if (!pointers.size) this.#moved = 0;
      pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
      cancelAnimationFrame(this.#flight);
    });
    canvas.addEventListener("pointermove", (event) => this.#drag(event));
    for (const end of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(end, (event) => {
        if (!pointers.delete(event.pointerId) || pointers.size) return;
        canvas.classList.remove("moving");
        if (end === "pointerup" && this.#moved < 6) {
          const touch = event.pointerType === "touch", apart = event.ctrlKey || event.metaKey || event.button === 1;
          this.#told.tapped(event.offsetX, event.offsetY, { touch, apart });
        }
      });
    }
    canvas.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") this.#told.hovered(null); });
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  #drag(event) {
    const pointers = this.#pointers, before = pointers.get(event.pointerId);
    const now = [event.offsetX, event.offsetY];
    if (!before) {
      if (event.pointerType !== "touch") this.#told.hovered(...now);
      return;
    }
    const [dx, dy] = [now[0] - before[0], now[1] - before[1]];
    this.#moved += Math.abs(dx) + Math.abs(dy);
    if (this.#moved >= 6) {
      this.#canvas.classList.add("moving");
      this.#told.hovered(null);
    }
    if (pointers.size === 2) {
      const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
      const apart = (one) => Math.hypot(one[0] - other[0], one[1] - other[1]);
      this.#zoomAt((now[0] + other[0]) / 2, (now[1] + other[1]) / 2, apart(now) / Math.max(1, apart(before)));
    }
    this.x -= dx / this.scale / pointers.size;
    this.y -= dy / this.scale / pointers.size;
    pointers.set(event.pointerId, now);
    this.#changed();
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const far = Math.min(this.width, this.height) / 5;
    const does = {
      ArrowLeft: () => this.panBy(-far, 0), ArrowRight: () => this.panBy(far, 0),
      ArrowUp: () => this.panBy(0, -far), ArrowDown: () => this.panBy(0, far),
      "+": () => this.zoomBy(1.5), "=": () => this.zoomBy(1.5), "-": () => this.zoomBy(1 / 1.5), "−": () => this.zoomBy(1 / 1.5),
      0: () => this.fit({ slowly: true }), Home: () => this.fit({ slowly: true }),
    }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  }
}
