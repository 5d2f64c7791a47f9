// The drawing of an arena: its buffers, its axes, live bytes below, and what moves with the pointer above.
//
// Buffers never overlap, so all of them together are no more pixels than the canvas has. They are written into an array of
// pixels, beside which a second one holds the number of the buffer under each pixel: what lies under the pointer is one
// look into it. What moves with the pointer is drawn on a canvas of its own above, so that a hover draws no buffer again.

class Painting extends View {
  // A canvas in device pixels, drawn on in CSS pixels.
  prepare(canvas, w, h) {
    const d = window.devicePixelRatio || 1,
      g = canvas.getContext("2d"),
      wide = Math.max(Math.round(w * d), 1),
      tall = Math.max(Math.round(h * d), 1);
    if (canvas.width !== wide || canvas.height !== tall) {
      canvas.width = wide;
      canvas.height = tall;
    }
    g.setTransform(d, 0, 0, d, 0, 0);
    g.clearRect(0, 0, w, h);
    g.font = FONT;
    return g;
  }

  paint() {
    this.paintArena();
    this.paintLive();
    this.paintOver();
  }

  paintArena() {
    const { w, h } = (this.drawn = this.box()),
      g = this.prepare(this.arena, w, h),
      d = window.devicePixelRatio || 1,
      { plan, view } = this;
    const labels = this.raster(Math.round((w - LEFT - RIGHT) * d), Math.round((h - UP - DOWN) * d), d),
      dim = css("--dim");
    g.textBaseline = "middle";
    g.textAlign = "right";
    g.strokeStyle = css("--line");
    g.fillStyle = dim;
    g.lineWidth = 1;
    for (const t of ticks(view.y0, view.y1, 8, [2])) {
      const y = Math.round(this.Y(t, h)) + 0.5;
      g.beginPath();
      g.moveTo(LEFT, y);
      g.lineTo(w - RIGHT, y);
      g.stroke();
      g.fillText(bytes(t), LEFT - 8, y);
    }
    g.textAlign = "center";
    for (const t of ticks(view.x0, view.x1, w < 500 ? 5 : 12, [2, 2.5, 2])) {
      const x = this.X(t, w);
      g.fillText(exact(t), Math.min(x, w - g.measureText(exact(t)).width / 2), h - DOWN + 13);
      g.fillRect(x, h - DOWN, 1, 4);
    }
    g.fillText("step of the schedule", LEFT + (w - LEFT - RIGHT) / 2, h - 8);
    g.save();
    g.translate(9, UP + (h - UP - DOWN) / 2);
    g.rotate(-Math.PI / 2);
    g.fillText("offset in the arena, bytes", 0, 0);
    g.restore();
    if (this.sheet.width && this.sheet.height) {
      g.save();
      g.setTransform(1, 0, 0, 1, 0, 0);
      g.drawImage(this.sheet, Math.round(LEFT * d), Math.round(UP * d));
      g.restore();
    }
    g.save();
    g.beginPath();
    g.rect(LEFT, 0, w - LEFT - RIGHT, h - DOWN + 2);
    g.clip();
    g.textAlign = "left";
    for (const [i, s, e] of labels) this.label(g, i, s, e, w, h);
    for (let i = 0; i < plan.n; i++) if (plan.gapFrom[i + 1] > plan.gapFrom[i]) this.evicted(g, i, w, h);
    for (const a of plan.arrows) this.arrow(g, a, w, h);
    if (plan.data.backwardFrom)
      this.rule(g, this.X(plan.data.backwardFrom, w), 4, h - DOWN, dim, [2, 3], "backward", "right");
    this.rule(g, this.X(plan.data.peakStep + 0.5, w), 4, h - DOWN, css("--peak"), [5, 4], "peak");
    g.restore();
  }

  // Write the pixels of all buffers in view; returns [buffer, from, to] of each rectangle with room for a label.
  raster(wide, tall, d) {
    const { plan, look, view, sheet } = this,
      labels = [];
    if (wide < 1 || tall < 1) {
      sheet.width = sheet.height = 0;
      return labels;
    }
    sheet.width = wide;
    sheet.height = tall;
    const image = new ImageData(wide, tall),
      pixels = new Uint32Array(image.data.buffer),
      under = new Int32Array(wide * tall).fill(-1);
    const colours = look.pixels(),
      { offset, size, start, end, gapFrom } = plan,
      { group, mask } = look,
      { x0, x1, y0, y1 } = view;
    const sx = wide / (x1 - x0),
      sy = tall / (y1 - y0);
    const rectangle = (i, s, e) => {
      let left = Math.round((s - x0) * sx),
        right = Math.round((e - x0) * sx),
        top = tall - Math.round((offset[i] + size[i] - y0) * sy),
        bottom = tall - Math.round((offset[i] - y0) * sy);
      if (right <= left) right = left + 1;
      if (bottom <= top) {
        if (top >= tall) top = tall - 1;
        bottom = top + 1;
      }
      const room = right - left > 4 * d && bottom - top > 4 * d ? Math.max(1, Math.round(d)) : 0,
        colour = colours[group[i]][mask[i] ? 0 : 1];
      if (mask[i] && bottom - top >= 15 * d && Math.min(right, wide) - Math.max(left, 0) >= 60 * d)
        labels.push([i, s, e]);
      right = Math.min(right, wide);
      bottom = Math.min(bottom, tall);
      left = Math.max(left, 0);
      top = Math.max(top, 0);
      for (let y = top, row = top * wide; y < bottom; y++, row += wide) {
        if (y < bottom - room) for (let p = row + left, last = row + right - room; p < last; p++) pixels[p] = colour;
        for (let p = row + left, last = row + right; p < last; p++) under[p] = i;
      }
    };
    for (let i = 0; i < plan.n; i++) {
      if (end[i] <= x0 || start[i] >= x1 || offset[i] >= y1 || offset[i] + size[i] <= y0) continue;
      if (gapFrom[i + 1] === gapFrom[i]) rectangle(i, start[i], end[i]);
      else for (const [s, e] of plan.segments(i)) if (e > x0 && s < x1) rectangle(i, s, e);
    }
    sheet.getContext("2d").putImageData(image, 0, 0);
    Object.assign(this, { under, wide, tall, pixelRatio: d });
    return labels;
  }

  label(g, i, s, e, w, h) {
    const { plan } = this,
      from = Math.max(this.X(s, w), LEFT),
      to = Math.min(this.X(e, w), w - RIGHT),
      top = Math.max(this.Y(plan.offset[i] + plan.size[i], h), UP),
      bottom = Math.min(this.Y(plan.offset[i], h), h - DOWN);
    if (bottom - top < 12) return;
    const name = shortOp(plan.word("op", i)).replace(/^aten\./, "") || plan.ids[i];
    g.save();
    g.beginPath();
    g.rect(from, top, to - from - 6, bottom - top);
    g.clip();
    g.fillStyle = "#fff";
    g.fillText(`${bytes(plan.size[i])}  ${name}  ${plan.word("module", i)}`, from + 6, (top + bottom) / 2);
    g.restore();
  }

  // The line between the parts of a buffer that leaves and comes back to its place.
  evicted(g, i, w, h) {
    const { plan } = this,
      segments = plan.segments(i),
      y = this.Y(plan.offset[i] + plan.size[i] / 2, h);
    if (y < UP || y > h - DOWN || segments[segments.length - 1][0] < this.view.x0 || segments[0][1] > this.view.x1)
      return;
    g.strokeStyle = g.fillStyle = this.look.colour(i);
    for (let k = 1; k < segments.length; k++) {
      const from = this.X(segments[k - 1][1], w),
        to = this.X(segments[k][0], w);
      g.setLineDash([4, 3]);
      g.beginPath();
      g.moveTo(from, y);
      g.lineTo(to, y);
      g.stroke();
      g.setLineDash([]);
      g.beginPath();
      g.moveTo(to, y);
      g.lineTo(to - 6, y - 4);
      g.lineTo(to - 6, y + 4);
      g.fill();
    }
  }

  // An eviction, from where the bytes are freed to where they are back.
  arrow(g, [s, o, e, back, offload], w, h) {
    if (e < this.view.x0 || s > this.view.x1) return;
    const x0 = this.X(s, w),
      y0 = this.Y(o, h),
      x1 = this.X(e, w),
      y1 = this.Y(back, h),
      turn = Math.atan2(y1 - y0, x1 - x0);
    g.strokeStyle = g.fillStyle = css("--text");
    g.globalAlpha = 0.5;
    g.lineWidth = 1;
    g.setLineDash(offload ? [] : [5, 4]);
    g.beginPath();
    g.moveTo(x0, y0);
    g.lineTo(x1, y1);
    g.stroke();
    g.setLineDash([]);
    g.beginPath();
    g.moveTo(x1, y1);
    for (const side of [-0.4, 0.4]) g.lineTo(x1 - 8 * Math.cos(turn + side), y1 - 8 * Math.sin(turn + side));
    g.fill();
    g.globalAlpha = 1;
  }

  rule(g, x, from, to, stroke, dash, name, side = "left") {
    g.strokeStyle = stroke;
    g.lineWidth = 1;
    g.setLineDash(dash);
    g.beginPath();
    g.moveTo(x, from);
    g.lineTo(x, to);
    g.stroke();
    g.setLineDash([]);
    if (name) {
      if (x + 4 + g.measureText(name).width > g.canvas.clientWidth - RIGHT) side = "right";
      g.fillStyle = stroke;
      g.textAlign = side;
      g.textBaseline = "top";
      g.fillText(name, x + (side === "left" ? 4 : -4), from);
      g.textBaseline = "middle";
    }
  }

  // Live bytes by step: of all steps that share a pixel, the one with the most.
  paintLive() {
    const r = this.live.getBoundingClientRect(),
      w = r.width,
      h = r.height,
      g = this.prepare(this.live, w, h),
      { plan, view } = this;
    const top = Math.max(plan.TOP, this.extent.bytes),
      low = h - 18,
      high = 18,
      y = v => low - (v / top) * (low - high),
      px = (w - LEFT - RIGHT) / (view.x1 - view.x0),
      dim = css("--dim");
    g.save();
    g.beginPath();
    g.rect(LEFT, 0, w - LEFT - RIGHT, h);
    g.clip();
    g.beginPath();
    g.moveTo(this.X(Math.max(Math.floor(view.x0), 0), w), low);
    const last = Math.min(Math.ceil(view.x1), plan.STEPS);
    for (let s = Math.max(Math.floor(view.x0), 0); s < last;) {
      let to = Math.min(s + Math.max(Math.floor(1 / px), 1), last),
        most = 0;
      for (let k = s; k < to; k++) if (plan.live[k] > most) most = plan.live[k];
      g.lineTo(this.X(s, w), y(most));
      g.lineTo(this.X(to, w), y(most));
      s = to;
    }
    g.lineTo(this.X(last, w), low);
    g.closePath();
    g.fillStyle = css("--accent");
    g.globalAlpha = 0.28;
    g.fill();
    g.globalAlpha = 1;
    g.strokeStyle = css("--accent");
    g.lineWidth = 1;
    g.stroke();
    this.rule(g, this.X(plan.data.peakStep + 0.5, w), 0, low, css("--peak"), [5, 4], "");
    if (this.cursor !== null) this.rule(g, this.X(this.cursor + 0.5, w), 0, low, css("--accent"), [], "");
    g.restore();
    g.textBaseline = "middle";
    for (const [v, stroke, dash] of [
      [plan.data.arena, dim, [2, 3]],
      [plan.data.maxLive, css("--peak"), [5, 4]],
    ]) {
      g.strokeStyle = stroke;
      g.setLineDash(dash);
      g.beginPath();
      g.moveTo(LEFT, y(v));
      g.lineTo(w - RIGHT, y(v));
      g.stroke();
      g.setLineDash([]);
    }
    g.fillStyle = dim;
    g.textAlign = "right";
    g.fillText("0 B", LEFT - 8, low);
    g.fillText(bytes(plan.data.maxLive), LEFT - 8, y(plan.data.maxLive));
    g.textAlign = "left";
    let x = LEFT + 4;
    for (const [text, colour] of [
      ["live bytes", dim],
      ["max live " + bytes(plan.data.maxLive), css("--peak")],
      ["arena " + bytes(plan.data.arena), dim],
    ]) {
      if (x + g.measureText(text).width > w) break;
      g.fillStyle = colour;
      g.fillText(text, x, 8);
      x += g.measureText(text).width + 14;
    }
  }

  // What moves with the pointer: the buffer under it, pinned buffers, the chosen step.
  paintOver() {
    const { w, h } = this.box(),
      g = this.prepare(this.over, w, h);
    this.over.style.height = h + "px";
    g.beginPath();
    g.rect(LEFT, UP - 2, w - LEFT - RIGHT, h - UP - DOWN + 4);
    g.clip();
    const text = css("--text");
    for (const i of this.mates) this.outline(g, i, w, h, css("--peak"));
    this.pins.forEach((i, k) => i >= 0 && this.outline(g, i, w, h, text, String(k + 1)));
    if (this.hovered >= 0) this.outline(g, this.hovered, w, h, text);
    if (this.cursor !== null) this.rule(g, this.X(this.cursor + 0.5, w), UP, h - DOWN, css("--accent"), [], "");
  }

  outline(g, i, w, h, stroke, tag) {
    const { plan } = this,
      top = this.Y(plan.offset[i] + plan.size[i], h),
      tall = Math.max(this.Y(plan.offset[i], h) - top, 1);
    g.strokeStyle = stroke;
    g.lineWidth = 2;
    for (const [s, e] of plan.segments(i))
      g.strokeRect(this.X(s, w), top, Math.max(this.X(e, w) - this.X(s, w), 1), tall);
    if (!tag) return;
    const x = Math.min(
        Math.max((this.X(plan.start[i], w) + this.X(plan.segments(i)[0][1], w)) / 2, LEFT + 10),
        w - RIGHT - 10,
      ),
      y = Math.min(Math.max(top + tall / 2, UP + 10), h - DOWN - 10);
    g.fillStyle = stroke;
    g.beginPath();
    g.arc(x, y, 9, 0, 7);
    g.fill();
    g.fillStyle = css("--card");
    g.textAlign = "center";
    g.textBaseline = "middle";
    g.fillText(tag, x, y + 0.5);
  }
}
