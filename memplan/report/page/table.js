// The list of buffers: largest first, or those alive at a step; sorted by any column, walked through by keys.

const SHOWN = 300;
const COLUMNS = [
  ["size", "size", "num"],
  ["size", "bytes", "num"],
  ["kind", "kind", ""],
  ["start", "steps", "num"],
  ["tensor", "tensor", ""],
  ["module", "module", "wrap"],
  ["source", "source", ""],
  ["op", "op", ""],
  ["id", "name", ""],
];

class Table {
  // `on` has show(i) and pin(i).
  constructor(plan, look, on) {
    Object.assign(this, { plan, look, on, at: null, column: 0, down: true });
    COLUMNS.forEach(([key, name, cls], k) => {
      const head = add($("head"), "th", undefined, cls);
      head.scope = "col";
      add(head, "button", name).onclick = () => {
        this.down = this.column === k ? !this.down : key === "size";
        this.column = k;
        this.fill();
      };
    });
    $("rows").addEventListener("keydown", e => this.key(e));
  }

  order() {
    const { plan, look } = this,
      found = [],
      key = COLUMNS[this.column][0];
    for (let i = 0; i < plan.n; i++) if (look.mask[i] && (this.at === null || plan.aliveAt(i, this.at))) found.push(i);
    const values = key === "id" ? plan.ids : plan[key],
      words = key === "size" || key === "start" || key === "id" ? null : plan.words,
      way = this.down ? -1 : 1;
    const rank =
      words &&
      new Map(
        [...new Set(found.map(i => values[i]))].sort((a, b) => (words[a] < words[b] ? -1 : 1)).map((w, k) => [w, k]),
      );
    const of = rank ? i => rank.get(values[i]) : i => values[i];
    return found.sort((a, b) => {
      const x = of(a),
        y = of(b);
      return x < y ? -way : x > y ? way : a - b;
    });
  }

  fill() {
    const { plan } = this,
      found = this.order(),
      total = found.reduce((sum, i) => sum + plan.size[i], 0),
      rows = $("rows");
    $("listed").textContent =
      (this.at === null ? "Largest buffers" : `Alive at step ${exact(this.at)}`) +
      `: ${exact(found.length)} buffers, ` +
      (this.at === null ? "" : bytes(total) + ", ") +
      (found.length > SHOWN ? `the first ${SHOWN} shown` : "all shown");
    $("all").hidden = this.at === null;
    [...$("head").children].forEach((head, k) =>
      k === this.column
        ? head.setAttribute("aria-sort", this.down ? "descending" : "ascending")
        : head.removeAttribute("aria-sort"),
    );
    rows.replaceChildren();
    for (const i of found.slice(0, SHOWN)) {
      const row = add(rows, "tr"),
        w = name => plan.word(name, i);
      [
        bytes(plan.size[i]),
        exact(plan.size[i]),
        w("kind"),
        `${exact(plan.start[i])}-${exact(plan.end[i] - 1)}`,
        w("tensor"),
        w("module"),
        w("source"),
        shortOp(w("op")),
        plan.ids[i],
      ].forEach((text, k) => add(row, "td", text, COLUMNS[k][2]));
      row.tabIndex = rows.children.length === 1 ? 0 : -1;
      row.dataset.buffer = i;
      row.onclick = () => this.on.show(i);
    }
  }

  key(e) {
    const row = e.target.closest("tr"),
      rows = [...$("rows").children],
      at = rows.indexOf(row);
    if (e.target.closest("a") || at < 0) return;
    const go = {
      ArrowDown: at + 1,
      ArrowUp: at - 1,
      Home: 0,
      End: rows.length - 1,
      PageDown: Math.min(at + 10, rows.length - 1),
      PageUp: Math.max(at - 10, 0),
    }[e.key];
    if (go !== undefined) {
      if (rows[go]) {
        row.tabIndex = -1;
        rows[go].tabIndex = 0;
        rows[go].focus();
      }
    } else if (e.key === "Enter") this.on.show(Number(row.dataset.buffer));
    else if (e.key === " ") this.on.pin(Number(row.dataset.buffer));
    else return;
    e.preventDefault();
  }
}
