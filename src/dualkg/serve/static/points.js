// Points in the plane in the cells of a grid, which finds those in a window, and the nearest one,
// without visiting all.

export class Points {
  /** Coordinates from −1 to 1. */
  constructor(x, y) {
    this.x = Float32Array.from(x);
    this.y = Float32Array.from(y);
    this.size = Math.max(1, Math.min(256, Math.round(Math.sqrt(this.x.length / 4))));
    this.#sort();
  }

  get length() {
    return this.x.length;
  }

  /** The indices of the points, cell by cell. */
  #sort() {
    const { size, length } = this;
    const cells = new Uint32Array(length);
    this.starts = new Uint32Array(size * size + 1);
    for (let i = 0; i < length; i++) {
      cells[i] = this.#cell(this.y[i]) * size + this.#cell(this.x[i]);
      this.starts[cells[i] + 1]++;
    }
    for (let cell = 0; cell < size * size; cell++) this.starts[cell + 1] += this.starts[cell];
    const next = this.starts.slice();
    this.order = new Uint32Array(length);
    for (let i = 0; i < length; i++) this.order[next[cells[i]]++] = i;
  }

  #cell(coordinate) {
    return Math.max(0, Math.min(this.size - 1, Math.floor(((coordinate + 1) / 2) * this.size)));
  }

  /** The number of points in the cells that a window touches. */
  count(left, top, right, bottom) {
    let number = 0;
    this.#spans(left, top, right, bottom, (start, end) => {
      number += end - start;
    });
    return number;
  }

  /** Call `visit(i)` for the points in the cells that a window touches. */
  within(left, top, right, bottom, visit) {
    this.#spans(left, top, right, bottom, (start, end) => {
      for (let place = start; place < end; place++) visit(this.order[place]);
    });
  }

  /** Call `visit(start, end)` for the part of `order` in each row of cells that a window touches. */
  #spans(left, top, right, bottom, visit) {
    const firstColumn = this.#cell(left);
    const lastColumn = this.#cell(right);
    const lastRow = this.#cell(bottom);
    for (let row = this.#cell(top); row <= lastRow; row++) {
      const first = row * this.size + firstColumn;
      const last = row * this.size + lastColumn;
      visit(this.starts[first], this.starts[last + 1]);
    }
  }

  /** The points inside a polygon, by the crossings of a ray. */
  inside(corners) {
    const xs = corners.map(([x]) => x);
    const ys = corners.map(([, y]) => y);
    const found = [];
    this.within(Math.min(...xs), Math.min(...ys), Math.max(...xs), Math.max(...ys), (i) => {
      let isInside = false;
      for (let a = 0, b = corners.length - 1; a < corners.length; b = a++) {
        const [ax, ay] = corners[a];
        const [bx, by] = corners[b];
        const crosses = ay > this.y[i] !== by > this.y[i];
        if (crosses && this.x[i] < ax + ((bx - ax) * (this.y[i] - ay)) / (by - ay)) isInside = !isInside;
      }
      if (isInside) found.push(i);
    });
    return found;
  }

  /**
   * The point nearest to a position and within `reach`, or −1.
   *
   * Points that `preferred` accepts count as half as far.
   */
  nearest(x, y, reach, preferred = () => false) {
    let nearest = -1;
    let least = reach * reach;
    this.within(x - reach, y - reach, x + reach, y + reach, (i) => {
      const squared = (this.x[i] - x) ** 2 + (this.y[i] - y) ** 2;
      const weighed = squared * (preferred(i) ? 0.25 : 1);
      if (squared <= reach * reach && weighed < least) {
        least = weighed;
        nearest = i;
      }
    });
    return nearest;
  }
}
