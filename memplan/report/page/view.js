// What of an arena is in view: steps to the right, offsets upwards, and where they are on a canvas.

const LEFT = 84,
  RIGHT = 14,
  UP = 22,
  DOWN = 40,
  FONT = "11px system-ui, 'DejaVu Sans', sans-serif";

class View {
  // `extent` are the largest step and offset that there are to see.
  constructor(plan, extent) {
    Object.assign(this, { plan, extent, hovered: -1 });
    this.view = this.full();
  }

  full() {
    return { x0: 0, x1: this.extent.steps, y0: 0, y1: this.extent.bytes * 1.01 };
  }

  X(s, w) {
    const v = this.view;
    return LEFT + ((s - v.x0) / (v.x1 - v.x0)) * (w - LEFT - RIGHT);
  }

  Y(o, h) {
    const v = this.view;
    return h - DOWN - ((o - v.y0) / (v.y1 - v.y0)) * (h - UP - DOWN);
  }

  stepAt(px, w) {
    const v = this.view;
    return v.x0 + ((px - LEFT) / (w - LEFT - RIGHT)) * (v.x1 - v.x0);
  }

  offsetAt(py, h) {
    const v = this.view;
    return v.y0 + ((h - DOWN - py) / (h - UP - DOWN)) * (v.y1 - v.y0);
  }

  setView(view, quiet = false) {
    const f = this.full(),
      wide = Math.min(Math.max(view.x1 - view.x0, 1.5), f.x1),
      high = Math.min(Math.max(view.y1 - view.y0, 16), f.y1);
    const x = Math.min(Math.max(view.x0, 0), f.x1 - wide),
      y = Math.min(Math.max(view.y0, 0), f.y1 - high);
    this.view = { x0: x, x1: x + wide, y0: y, y1: y + high };
    this.draw();
    if (!quiet) this.on.view();
  }

  zoom(factor, s, o, along = true, across = true) {
    const v = { ...this.view };
    if (along) {
      v.x0 = s - (s - v.x0) * factor;
      v.x1 = s + (v.x1 - s) * factor;
    }
    if (across) {
      v.y0 = o - (o - v.y0) * factor;
      v.y1 = o + (v.y1 - o) * factor;
    }
    this.setView(v);
  }

  centre(factor) {
    const v = this.view;
    this.zoom(factor, (v.x0 + v.x1) / 2, (v.y0 + v.y1) / 2);
  }

  reset() {
    this.setView(this.full());
  }

  pan(dx, dy) {
    const v = this.view,
      w = ((v.x1 - v.x0) / 8) * dx,
      h = ((v.y1 - v.y0) / 8) * dy;
    this.setView({ x0: v.x0 + w, x1: v.x1 + w, y0: v.y0 + h, y1: v.y1 + h });
  }

  toPeak() {
    const wide = Math.max(this.plan.STEPS / 8, 12),
      p = this.plan.data.peakStep;
    this.setView({ ...this.full(), x0: p - wide / 2, x1: p + wide / 2 });
  }

  show(i) {
    const { plan } = this,
      wide = Math.max((plan.end[i] - plan.start[i]) * 1.6, 6),
      high = plan.size[i] * 6,
      x = (plan.start[i] + plan.end[i]) / 2,
      y = plan.offset[i] + plan.size[i] / 2;
    this.hovered = i;
    this.setView({ x0: x - wide / 2, x1: x + wide / 2, y0: y - high / 2, y1: y + high / 2 });
  }

  // Zoom and move by the keys that the picture knows; returns whether it was one.
  key(key) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
    if (key === "+" || key === "=") this.centre(0.7);
    else if (key === "-") this.centre(1 / 0.7);
    else if (key === "0") this.reset();
    else if (moves[key]) this.pan(...moves[key]);
    else return false;
    return true;
  }
}
