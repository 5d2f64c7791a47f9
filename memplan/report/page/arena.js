// An arena on the page: its canvases, and what pointer and wheel do there.

class Arena extends Painting {
  // `extent` are the largest step and offset to show; `on` has the functions hover(i, event, step), pick(i, event), view(),
  // step(event, step), at(step), leave().
  constructor(parent, plan, look, on, extent = { steps: plan.STEPS, bytes: plan.ARENA }, signal = undefined) {
    super(plan, extent);
    Object.assign(this, {
      look,
      on,
      cursor: null,
      pins: [],
      mates: [],
      drag: null,
      due: false,
    });
    this.arena = add(parent, "canvas", undefined, "arena");
    this.over = add(parent, "canvas", undefined, "over");
    this.live = add(parent, "canvas", undefined, "live");
    this.arena.tabIndex = 0;
    this.arena.setAttribute("role", "img");
    this.arena.setAttribute(
      "aria-label",
      "Buffers of the arena: steps of the schedule to the right, offsets in bytes upwards",
    );
    this.live.setAttribute("role", "img");
    this.live.setAttribute("aria-label", "Live bytes by step");
    this.over.setAttribute("aria-hidden", "true");
    this.sheet = document.createElement("canvas");
    this.listen();
    const redraw = () => this.draw();
    // The window's size, a scroll bar that appears, a list of modules that opens: whatever changes the size of the picture.
    const sized = new ResizeObserver(() => {
      const { w, h } = this.box();
      if (w !== this.drawn?.w || h !== this.drawn?.h) redraw();
    });
    sized.observe(this.arena);
    signal?.addEventListener("abort", () => sized.disconnect());
    document.addEventListener("memplan-theme", redraw, { signal });
    addEventListener("beforeprint", () => this.paint(), { signal });
  }

  box() {
    const r = this.arena.getBoundingClientRect();
    return { left: r.left, top: r.top, w: r.width, h: r.height };
  }

  draw() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      this.paint();
    });
  }

  hover(i, cursor = null) {
    if (i === this.hovered && cursor === this.cursor) return;
    const moved = cursor !== this.cursor;
    this.hovered = i;
    this.cursor = cursor;
    this.paintOver();
    if (moved) this.paintLive();
  }

  // The buffer under a place of the canvas, -1 for none.
  hit(px, py) {
    const x = Math.floor((px - LEFT) * this.pixelRatio),
      y = Math.floor((py - UP) * this.pixelRatio);
    return !this.under || x < 0 || y < 0 || x >= this.wide || y >= this.tall ? -1 : this.under[y * this.wide + x];
  }

  // Where a buffer's first part is on the screen.
  place(i) {
    const { left, top, w, h } = this.box(),
      [s, e] = this.plan.segments(i)[0];
    return { x: left + this.X((s + e) / 2, w), y: top + this.Y(this.plan.offset[i] + this.plan.size[i] / 2, h) };
  }

  listen() {
    const { arena, live } = this;
    arena.addEventListener(
      "wheel",
      e => {
        e.preventDefault();
        const { left, top, w, h } = this.box(),
          amount = Math.max(-200, Math.min(200, e.deltaY || e.deltaX));
        this.zoom(
          Math.exp(amount * 0.0022),
          this.stepAt(e.clientX - left, w),
          this.offsetAt(e.clientY - top, h),
          !e.altKey,
          !e.shiftKey,
        );
      },
      { passive: false },
    );
    arena.addEventListener("pointerdown", e => {
      this.down = { x: e.clientX, y: e.clientY };
      if (e.pointerType === "touch" || e.button) return; // a finger that moves scrolls the page
      this.drag = { x: e.clientX, y: e.clientY, view: { ...this.view } };
      arena.setPointerCapture(e.pointerId);
      arena.classList.add("drag");
    });
    const release = () => {
      this.drag = null;
      arena.classList.remove("drag");
    };
    arena.addEventListener("pointerup", release);
    arena.addEventListener("pointercancel", release);
    arena.addEventListener("pointermove", e => {
      if (e.pointerType === "touch") return;
      const { left, top, w, h } = this.box();
      if (this.drag) {
        const { x, y, view } = this.drag,
          dx = ((e.clientX - x) / (w - LEFT - RIGHT)) * (view.x1 - view.x0),
          dy = ((e.clientY - y) / (h - UP - DOWN)) * (view.y1 - view.y0);
        if (dx || dy) this.setView({ x0: view.x0 - dx, x1: view.x1 - dx, y0: view.y0 + dy, y1: view.y1 + dy });
        return;
      }
      const i = this.hit(e.clientX - left, e.clientY - top);
      this.hover(i);
      this.on.hover(i, e, Math.floor(this.stepAt(e.clientX - left, w)));
    });
    arena.addEventListener("click", e => {
      if (this.down && Math.hypot(e.clientX - this.down.x, e.clientY - this.down.y) > 4) return; // the end of a drag
      const { left, top } = this.box(),
        i = this.hit(e.clientX - left, e.clientY - top);
      if (i >= 0) this.on.pick(i, e);
    });
    arena.addEventListener("dblclick", () => this.reset());
    const stepOf = e => {
      const r = live.getBoundingClientRect();
      return Math.min(Math.max(Math.floor(this.stepAt(e.clientX - r.left, r.width)), 0), this.plan.STEPS - 1);
    };
    live.addEventListener("pointermove", e => {
      if (e.pointerType !== "touch") {
        this.hover(-1, stepOf(e));
        this.on.step(e, this.cursor);
      }
    });
    live.addEventListener("click", e => {
      this.hover(-1, stepOf(e));
      this.on.at(this.cursor);
    });
    for (const canvas of [arena, live])
      canvas.addEventListener("pointerleave", () => {
        this.hover(-1);
        this.on.leave();
      });
  }
}
