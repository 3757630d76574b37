// A view of a plane: its centre and scale, moved by mouse, touch and keys.

const MIN_ZOOM = 0.5; // relative to the whole plane
const MAX_ZOOM = 400;
const EASE = 180; // milliseconds
const MAX_WHEEL = 120; // pixels of one event
const MIN_DRAG = 6; // pixels; a shorter movement is a tap
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class View {
  x = 0;
  y = 0;
  scale = 1; // pixels of one unit
  fitting = 1;
  width = 1;
  height = 1;
  ratio = 1;
  isHeld = false; // while something else listens to the pointer
  #canvas;
  #listeners;
  #pointers = new Map();
  #moved = 0;
  #animation = 0;

  /**
   * Calls `changed()` when the view must be drawn again.
   *
   * Calls `tapped(x, y, how)` and `hovered(x, y)` in pixels; x is null if the pointer has left.
   */
  constructor(canvas, { changed, tapped, hovered }) {
    this.#canvas = canvas;
    this.#listeners = { changed, tapped, hovered };
    new ResizeObserver(() => this.#resize()).observe(canvas);
    this.#listen();
  }

  position(px, py) {
    return [(px - this.width / 2) / this.scale + this.x, (py - this.height / 2) / this.scale + this.y];
  }

  pixel(x, y) {
    return [(x - this.x) * this.scale + this.width / 2, (y - this.y) * this.scale + this.height / 2];
  }

  /** The whole plane, from −1 to 1. */
  fit({ animated = false } = {}) {
    this.#go({ x: 0, y: 0, scale: this.fitting }, animated);
  }

  /** Some positions, with a margin. */
  frame(positions) {
    const xs = positions.map(([x]) => x);
    const ys = positions.map(([, y]) => y);
    const left = Math.min(...xs);
    const right = Math.max(...xs);
    const top = Math.min(...ys);
    const bottom = Math.max(...ys);
    const across = this.width / (right - left || 0.01);
    const down = this.height / (bottom - top || 0.01);
    const scale = this.#clamped(0.8 * Math.min(across, down));
    this.#go({ x: (left + right) / 2, y: (top + bottom) / 2, scale }, true);
  }

  zoomBy(factor) {
    this.#go({ x: this.x, y: this.y, scale: this.#clamped(this.scale * factor) }, true);
  }

  panBy(px, py) {
    this.#go({ x: this.x + px / this.scale, y: this.y + py / this.scale, scale: this.scale }, true);
  }

  /** A position in the middle, at a zoom relative to the whole plane. */
  centre(x, y, zoom, { animated = true } = {}) {
    this.#go({ x, y, scale: this.#clamped(this.fitting * zoom) }, animated);
  }

  /** Move only if a position is out of view. */
  show(x, y) {
    const [px, py] = this.pixel(x, y);
    const outside = px < 30 || py < 30 || px > this.width - 30 || py > this.height - 30;
    if (outside) this.#go({ x, y, scale: this.scale }, true);
  }

  #clamped(scale) {
    return Math.max(this.fitting * MIN_ZOOM, Math.min(this.fitting * MAX_ZOOM, scale));
  }

  /** At once, or animated; the next movement cancels the animation. */
  #go(to, animated) {
    cancelAnimationFrame(this.#animation);
    const from = { x: this.x, y: this.y, scale: this.scale };
    const started = performance.now();
    const moves = animated && !still.matches;
    const step = (now) => {
      const share = moves ? Math.max(0, Math.min(1, (now - started) / EASE)) : 1;
      const eased = 1 - (1 - share) ** 3;
      this.scale = from.scale * (to.scale / from.scale) ** eased;
      this.x = from.x + (to.x - from.x) * eased;
      this.y = from.y + (to.y - from.y) * eased;
      this.#changed();
      if (share < 1) this.#animation = requestAnimationFrame(step);
    };
    if (moves) this.#animation = requestAnimationFrame(step);
    else step(started);
  }

  /** Zoom around a pixel. */
  #zoomAt(px, py, factor) {
    cancelAnimationFrame(this.#animation);
    const [x, y] = this.position(px, py);
    this.scale = this.#clamped(this.scale * factor);
    this.x = x - (px - this.width / 2) / this.scale;
    this.y = y - (py - this.height / 2) / this.scale;
    this.#changed();
  }

  #changed() {
    this.x = Math.max(-1.5, Math.min(1.5, this.x));
    this.y = Math.max(-1.5, Math.min(1.5, this.y));
    this.#listeners.changed();
  }

  #resize() {
    const { clientWidth, clientHeight } = this.#canvas;
    const before = this.scale / this.fitting;
    this.ratio = Math.min(2, devicePixelRatio || 1);
    this.width = clientWidth;
    this.height = clientHeight;
    this.#canvas.width = Math.round(clientWidth * this.ratio);
    this.#canvas.height = Math.round(clientHeight * this.ratio);
    this.fitting = Math.max(1, Math.min(clientWidth, clientHeight) / 2.12);
    this.scale = this.fitting * (before || 1);
    this.#changed();
  }

  #listen() {
    const canvas = this.#canvas;
    const pointers = this.#pointers;
    canvas.addEventListener("wheel", (event) => this.#turn(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button > 1 || this.isHeld) return;
      canvas.setPointerCapture(event.pointerId);
      if (!pointers.size) this.#moved = 0;
      pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
      cancelAnimationFrame(this.#animation);
    });
    canvas.addEventListener("pointermove", (event) => this.#drag(event));
    for (const end of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(end, (event) => {
        if (!pointers.delete(event.pointerId) || pointers.size) return;
        canvas.classList.remove("moving");
        if (end === "pointerup" && this.#moved < MIN_DRAG) {
          const touch = event.pointerType === "touch";
          const apart = event.ctrlKey || event.metaKey || event.button === 1; // in another tab
          this.#listeners.tapped(event.offsetX, event.offsetY, { touch, apart });
        }
      });
    }
    canvas.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") this.#listeners.hovered(null);
    });
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Zoom by the wheel, or by a pinch on a touchpad, which browsers report as Ctrl and the wheel. */
  #turn(event) {
    event.preventDefault();
    const pixelsPerUnit = event.deltaMode === 1 ? 16 : 1; // lines, or pixels
    const pixels = Math.max(-MAX_WHEEL, Math.min(MAX_WHEEL, event.deltaY * pixelsPerUnit));
    const speed = event.ctrlKey ? 0.01 : 0.0022;
    this.#zoomAt(event.offsetX, event.offsetY, Math.exp(-pixels * speed));
    this.#listeners.hovered(event.offsetX, event.offsetY);
  }

  #drag(event) {
    const pointers = this.#pointers;
    const before = pointers.get(event.pointerId);
    const now = [event.offsetX, event.offsetY];
    if (!before) {
      if (event.pointerType !== "touch") this.#listeners.hovered(...now);
      return;
    }
    const dx = now[0] - before[0];
    const dy = now[1] - before[1];
    this.#moved += Math.abs(dx) + Math.abs(dy);
    if (this.#moved >= MIN_DRAG) {
      this.#canvas.classList.add("moving");
      this.#listeners.hovered(null);
    }
    if (pointers.size === 2) {
      const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
      const distance = (pixel) => Math.hypot(pixel[0] - other[0], pixel[1] - other[1]);
      const factor = distance(now) / Math.max(1, distance(before));
      this.#zoomAt((now[0] + other[0]) / 2, (now[1] + other[1]) / 2, factor);
    }
    this.x -= dx / this.scale / pointers.size;
    this.y -= dy / this.scale / pointers.size;
    pointers.set(event.pointerId, now);
    this.#changed();
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const far = Math.min(this.width, this.height) / 5;
    const zoomIn = () => this.zoomBy(1.5);
    const zoomOut = () => this.zoomBy(1 / 1.5);
    const fit = () => this.fit({ animated: true });
    const actions = {
      ArrowLeft: () => this.panBy(-far, 0),
      ArrowRight: () => this.panBy(far, 0),
      ArrowUp: () => this.panBy(0, -far),
      ArrowDown: () => this.panBy(0, far),
      "+": zoomIn,
      "=": zoomIn,
      "-": zoomOut,
      "−": zoomOut,
      0: fit,
      Home: fit,
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }
}
