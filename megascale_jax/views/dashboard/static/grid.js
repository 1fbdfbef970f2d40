// A grid of many cells on a canvas: colour is a fraction around 0, rings mark cells; columns can be zoomed and moved.
// Of cells that share a pixel the one farthest from 0 is drawn, so no slow device is lost.
"use strict";
const grids = (() => {
  const UNKNOWN = -32768, SHADES = 512;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const rgb = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  let palette = null;
  const colours = () => {
    if (palette) return palette;
    const [low, mid, high, none] = ["--heat-low", "--heat-mid", "--heat-high", "--heat-none"].map((name) => rgb(css(name)));
    const shades = new Uint32Array(SHADES + 1);
    const word = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
    for (let n = 0; n <= SHADES; n++) {
      const at = (n / SHADES) * 2 - 1, end = at < 0 ? low : high, part = Math.abs(at);
      shades[n] = word(mid.map((one, k) => Math.round(one + (end[k] - one) * part)));
    }
    palette = { shades, none: word(none), text: css("--muted"), line: css("--line"), ring: css("--ring"), cursor: css("--accent"), surface: css("--surface") };
    return palette;
  };
  document.addEventListener("theme", () => { palette = null; });

  const ticks = (from, to, most) => {
    const raw = Math.max((to - from) / most, 1), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
    const found = [];
    for (let at = Math.ceil(from / step) * step; at < to; at += step) found.push(at);
    return found;
  };

  class Grid {
    // options: rows, columns, value(row, column) -> ten-thousandths, span (of colours), rowLabel(row), columnLabel(column),
    // rings: [[row, column]], columnTitle, lines: columns between groups, rowHeight
    constructor(canvas, options) {
      this.canvas = canvas;
      this.left = 64; this.bottom = 30; this.top = 2; this.right = 8;
      this.cursor = null;
      this.set(options);
    }
    set(options) {
      Object.assign(this, options);
      const most = this.mostHeight || 420;
      this.height = Math.max(Math.min(this.rows * (this.rowHeight || 22), most), Math.min(this.rows * 2, 40), 24);
      this.canvas.style.height = `${this.height + this.top + this.bottom}px`;
    }
    get width() { return Math.max(this.canvas.clientWidth - this.left - this.right, 10); }
    columnAt(x, view) { return view.from + ((x - this.left) / this.width) * (view.to - view.from); }
    cellAt(x, y, view) {
      const column = Math.floor(this.columnAt(x, view)), row = Math.floor(((y - this.top) / this.height) * this.rows);
      return row >= 0 && row < this.rows && column >= view.from - 1 && column >= 0 && column < Math.min(view.to, this.columns) ? [row, column] : null;
    }
    draw(view) {
      const ratio = Math.min(devicePixelRatio || 1, 2), look = colours(), canvas = this.canvas;
      const width = Math.round(canvas.clientWidth * ratio), height = Math.round((this.height + this.top + this.bottom) * ratio);
      if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
      const paper = canvas.getContext("2d");
      paper.setTransform(1, 0, 0, 1, 0, 0);
      paper.clearRect(0, 0, width, height);
      const w = Math.round(this.width * ratio), h = Math.round(this.height * ratio);
      paper.putImageData(this.image(view, w, h, look), Math.round(this.left * ratio), Math.round(this.top * ratio));
      paper.setTransform(ratio, 0, 0, ratio, 0, 0);
      this.marks(paper, view, look);
    }
    image(view, w, h, look) {
      const image = new ImageData(w, h), pixels = new Uint32Array(image.data.buffer);
      const span = view.to - view.from, half = SHADES / 2, perShade = half / (this.span * 10000);
      const bounds = new Int32Array(w + 1);
      for (let x = 0; x <= w; x++) bounds[x] = Math.min(Math.floor(view.from + (x / w) * span), this.columns);
      const isCoarse = this.rows > h;
      const lines = isCoarse ? h : this.rows, line = new Uint32Array(w);
      for (let n = 0; n < lines; n++) {
        const r0 = isCoarse ? Math.floor((n * this.rows) / h) : n, r1 = isCoarse ? Math.max(Math.floor(((n + 1) * this.rows) / h), r0 + 1) : n + 1;
        for (let x = 0; x < w; x++) {
          const c0 = bounds[x], c1 = Math.max(bounds[x + 1], c0 + 1);
          let farthest = UNKNOWN, size = -1;
          for (let r = r0; r < r1; r++) for (let c = c0; c < c1 && c < this.columns; c++) {
            const value = this.value(r, c);
            if (value !== UNKNOWN && (value < 0 ? -value : value) > size) { farthest = value; size = value < 0 ? -value : value; }
          }
          line[x] = farthest === UNKNOWN ? look.none : look.shades[Math.max(0, Math.min(SHADES, Math.round(half + farthest * perShade)))];
        }
        const y0 = Math.floor((n * h) / lines), y1 = Math.floor(((n + 1) * h) / lines), gap = y1 - y0 > 8 && this.rows > 1 ? 1 : 0;
        for (let y = y0; y < y1 - gap; y++) pixels.set(line, y * w);
      }
      return image;
    }
    marks(paper, view, look) {
      const x = (column) => this.left + ((column - view.from) / (view.to - view.from)) * this.width;
      const y = (row) => this.top + ((row + 0.5) / this.rows) * this.height;
      paper.font = "11px system-ui, sans-serif";
      paper.fillStyle = look.text;
      paper.textBaseline = "middle";
      paper.textAlign = "right";
      for (const row of ticks(0, this.rows, Math.max(this.height / 16, 1))) paper.fillText(this.rowLabel(row), this.left - 6, y(row));
      paper.textBaseline = "top";
      paper.textAlign = "center";
      for (const column of ticks(view.from, view.to, Math.max(this.width / 80, 1))) {
        if (column < this.columns) paper.fillText(this.columnLabel(column), Math.max(x(column + 0.5), this.left), this.top + this.height + 4);
      }
      paper.textAlign = "left";
      paper.fillText(this.columnTitle, this.left, this.top + this.height + 17);
      paper.save();
      paper.beginPath();
      paper.rect(this.left - 9, 0, this.width + 18, this.top + this.height + 9);
      paper.clip();
      if (this.lines && this.width / ((view.to - view.from) / this.lines) > 12) {
        paper.fillStyle = look.surface;
        for (let column = Math.ceil(view.from / this.lines) * this.lines; column < view.to; column += this.lines) if (column > view.from) paper.fillRect(x(column) - 1, this.top, 2, this.height);
      }
      const ring = (row, column, colour, radius, thick) => {
        paper.beginPath();
        paper.arc(x(column + 0.5), y(row), radius, 0, 2 * Math.PI);
        paper.lineWidth = thick + 2; paper.strokeStyle = look.surface; paper.stroke();
        paper.lineWidth = thick; paper.strokeStyle = colour; paper.stroke();
      };
      for (const [row, column] of this.rings) if (column >= view.from - 1 && column <= view.to) ring(row, column, look.ring, 8, 1.8);
      if (this.cursor) {
        const [row, column] = this.cursor, wide = Math.max(this.width / (view.to - view.from), 5), high = Math.max(this.height / this.rows, 5);
        paper.lineWidth = 2; paper.strokeStyle = look.cursor;
        paper.strokeRect(x(column + 0.5) - wide / 2, y(row) - high / 2, wide, high);
      }
      paper.restore();
    }
  }
  return { Grid, UNKNOWN };
})();
