// Points in the plane in the cells of a grid: finds those in a window, and the nearest one, without visiting all.

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
    const firstColumn = this.#cell(left), lastColumn = this.#cell(right), lastRow = this.#cell(bottom);
    let number = 0;
    for (let row = this.#cell(top); row <= lastRow; row++) {
      number += this.starts[row * this.size + lastColumn + 1] - this.starts[row * this.size + firstColumn];
    }
    return number;
  }

  /** Call `visit(i)` for the points in the cells that a window touches. */
  within(left, top, right, bottom, visit) {
    const firstColumn = this.#cell(left), lastColumn = this.#cell(right), lastRow = this.#cell(bottom);
    for (let row = this.#cell(top); row <= lastRow; row++) {
      const end = this.starts[row * this.size + lastColumn + 1];
      for (let place = this.starts[row * this.size + firstColumn]; place < end; place++) visit(this.order[place]);
    }
  }

  /** The point nearest to a position and within `reach`, or −1; those that `preferred` accepts count as half as far. */
  nearest(x, y, reach, preferred = () => false) {
    let found = -1, least = reach * reach;
    this.within(x - reach, y - reach, x + reach, y + reach, (i) => {
      const far = (this.x[i] - x) ** 2 + (this.y[i] - y) ** 2;
      const weighed = far * (preferred(i) ? 0.25 : 1);
      if (far <= reach * reach && weighed < least) {
        least = weighed;
        found = i;
      }
    });
    return found;
  }
}
