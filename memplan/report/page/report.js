// One plan on the page: the arena with its filters, pinned buffers, and the list.

class Report {
  // `address`: whether the state is kept in the hash of the page's address.
  constructor(plan, { address = true } = {}) {
    Object.assign(this, { plan, address, stopped: new AbortController() });
    const { data } = plan,
      look = (this.look = new Look(plan));
    $("cards").replaceChildren();
    for (const [name, value, remark] of data.figures) {
      const card = add($("cards"), "div", undefined, "card");
      add(card, "small", name);
      add(card, "b", value);
      add(card, "small", remark);
    }
    for (const name of ["notes", "proofs"]) {
      for (const line of data[name]) add($(name), "li", line);
      $(name).closest("section").hidden = !data[name].length;
    }
    if (matchMedia("(max-width: 760px)").matches) $("modules").open = false;
    this.arena = new Arena(
      $("stage"),
      plan,
      look,
      {
        hover: (i, e, step) => {
          if (i < 0) hideTip();
          else {
            const op = plan.opText(step);
            tip(e, [...plan.describe(i), op && `step ${exact(step)}: ${op}`]);
          }
        },
        pick: i => {
          hideTip();
          this.pin(i);
        },
        view: () => this.save(),
        step: (e, step) =>
          tip(e, [
            `${bytes(plan.live[step])} live (${exact(plan.live[step])} B)`,
            `step ${exact(step)}`,
            plan.opText(step),
            `${((plan.live[step] / plan.TOP) * 100).toFixed(1)} % of the arena`,
          ]),
        at: step => this.list(step),
        leave: hideTip,
      },
      undefined,
      this.stopped.signal,
    );
    this.arena.arena.id = "arena";
    this.arena.live.id = "live";
    this.table = new Table(plan, look, {
      show: i => {
        this.arena.show(i);
        this.arena.arena.scrollIntoView({ block: "center" });
      },
      pin: i => this.pin(i),
    });
    this.tree = new Tree($("tree"), plan, path => {
      look.module = look.module === path ? null : path;
      this.tree.mark(look.module);
      this.filtered();
    });
    $("in").onclick = () => this.arena.centre(0.6);
    $("out").onclick = () => this.arena.centre(1 / 0.6);
    $("reset").onclick = () => this.arena.reset();
    $("peak").onclick = () => {
      this.arena.toPeak();
      this.list(data.peakStep);
    };
    $("all").onclick = () => this.list(null);
    $("clear").onclick = () => {
      look.wanted = $("find").value = "";
      look.module = null;
      look.off.clear();
      this.tree.mark(null);
      this.legend();
      this.filtered();
    };
    $("by").onchange = () => {
      look.colourBy($("by").value);
      this.legend();
      this.filtered();
    };
    $("find").oninput = e => {
      look.wanted = e.target.value.trim();
      this.filtered();
    };
    this.restore(address ? readHash() : {});
    this.arena.paint();
    performance.mark("memplan-painted");
    setTimeout(() => this.table.fill(), 0); // after the picture is on the screen
    if (address)
      addEventListener(
        "hashchange",
        () => {
          this.restore(readHash());
          this.arena.draw();
          this.table.fill();
        },
        { signal: this.stopped.signal },
      );
  }

  close() {
    this.stopped.abort();
    hideTip();
  }
  legend() {
    legend($("legend"), this.look, () => this.filtered());
  }

  filtered() {
    this.look.filter();
    $("clear").hidden = !this.look.filtered;
    this.arena.draw();
    this.table.fill();
    this.save();
  }

  list(step) {
    this.table.at = step;
    this.table.fill();
    this.save();
  }

  // Keep the details of a buffer open; a second time, close them.
  pin(i) {
    const { pins } = this.arena,
      at = pins.indexOf(i);
    if (at >= 0) pins.splice(at, 1);
    else pins.push(i);
    this.showPins();
    this.save();
  }

  showPins() {
    const { plan, arena } = this;
    $("pins").replaceChildren();
    arena.pins.forEach((i, k) => {
      const only = module => {
        this.look.module = module;
        this.tree.mark(module);
        this.filtered();
      };
      pinCard(plan, i, String(k + 1), plan.describe(i), { close: () => this.pin(i), zoom: () => arena.show(i), only });
    });
    arena.paintOver();
  }

  save() {
    if (!this.address) return;
    writeHash(() => {
      const { arena, look, table, plan } = this,
        v = arena.view,
        f = arena.full(),
        whole = v.x0 === f.x0 && v.x1 === f.x1 && v.y0 === f.y0 && v.y1 === f.y1;
      return {
        view: whole ? "" : [v.x0, v.x1, v.y0, v.y1].map(n => Number(n.toFixed(2))).join(","),
        by: look.by === "kind" ? "" : look.by,
        find: look.wanted,
        module: moduleText(look.module),
        off: joined([...look.off]),
        pins: joined(arena.pins.map(i => plan.ids[i])),
        at: table.at,
      };
    });
  }

  restore({ view = "", by = "kind", find = "", module: named = null, off = "", pins = "", at = "" }) {
    const { look, arena, plan, table } = this,
      v = view.split(",").map(Number),
      module = moduleOf(named);
    look.wanted = $("find").value = find;
    look.module = module !== null && plan.words.some(w => w === module || w.startsWith(module + ".")) ? module : null;
    $("by").value = ["kind", "module", "op"].includes(by) ? by : "kind";
    look.colourBy($("by").value);
    if (off) for (const name of parted(off)) if (look.groups.some(g => g.name === name)) look.off.add(name);
    look.filter();
    $("clear").hidden = !look.filtered;
    this.tree.mark(look.module);
    this.legend();
    table.at = /^\d+$/.test(at) && Number(at) < plan.STEPS ? Number(at) : null;
    arena.setView(
      v.length === 4 && v.every(Number.isFinite) && v[1] > v[0] && v[3] > v[2]
        ? { x0: v[0], x1: v[1], y0: v[2], y1: v[3] }
        : arena.full(),
      true,
    );
    const places = pins && new Map(plan.ids.map((id, i) => [id, i]));
    arena.pins = pins
      ? parted(pins)
          .filter(id => places.has(id))
          .map(id => places.get(id))
      : [];
    this.showPins();
  }
}

// The keys of a page that shows one plan; `report` returns it.
const reportKeys = report => {
  const arena = key => () => {
    const r = report();
    if (r) r.arena.key(key);
    return Boolean(r);
  };
  const moves = key => e => {
    const r = report();
    return Boolean(r && e.target === r.arena.arena && r.arena.key(key));
  };
  const click = id => () => {
    if (!report()) return false;
    $(id).click();
  };
  return [
    ["+", "zoom in", arena("+")],
    ["=", "zoom in", arena("+")],
    ["-", "zoom out", arena("-")],
    ["0", "show all", arena("0")],
    ["p", "the peak, and who is alive there", click("peak")],
    ["c", "clear the filter", click("clear")],
    [
      "/",
      "find",
      () => {
        if (!report()) return false;
        $("find").focus();
      },
    ],
    ["← → ↑ ↓", "move the picture that has the focus; walk through modules or the list"],
    ["ArrowLeft", "", moves("ArrowLeft")],
    ["ArrowRight", "", moves("ArrowRight")],
    ["ArrowUp", "", moves("ArrowUp")],
    ["ArrowDown", "", moves("ArrowDown")],
    ["Enter", "in the list: zoom to the buffer; in the modules: filter by it"],
    ["Space", "in the list: keep its details open"],
  ];
};
