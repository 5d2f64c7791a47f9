// Which buffer has which colour, and which are dimmed: by the legend, the module tree, and the search.

const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const rgb = hex => [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));
const pack = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
const MOST_GROUPS = 8,
  DIMMED = 0.16;

class Look {
  constructor(plan) {
    this.plan = plan;
    this.off = new Set();
    this.wanted = "";
    this.module = null;
    this.group = new Uint8Array(plan.n);
    this.mask = new Uint8Array(plan.n).fill(1);
    this.colourBy("kind");
  }

  name(by, word) {
    const text = this.plan.words[word];
    return by === "module" ? pattern(text) || "no module" : by === "op" ? shortOp(text) || "no op" : text || "buffer";
  }

  // Give the eight largest kinds, modules or ops a colour each, and all others grey.
  colourBy(by) {
    const { plan } = this,
      { palette, colours } = plan.data,
      column = plan[by],
      sums = new Map(),
      names = new Map();
    for (let i = 0; i < plan.n; i++) {
      let name = names.get(column[i]);
      if (name === undefined) names.set(column[i], (name = this.name(by, column[i])));
      sums.set(name, (sums.get(name) || 0) + plan.size[i]);
    }
    const ranked = [...sums.keys()].sort((a, b) => sums.get(b) - sums.get(a));
    const own = new Set(ranked.slice(0, ranked.length > MOST_GROUPS + 1 ? MOST_GROUPS : ranked.length));
    const fixed = name => by === "kind" && colours[name === "buffer" && !("buffer" in colours) ? "" : name];
    const free = palette.others.filter(c => ![...own].some(name => fixed(name) === c));
    this.by = by;
    this.groups = [...own].map(name => ({
      name,
      colour: fixed(name) || free.shift() || palette.rest,
      bytes: sums.get(name),
    }));
    const index = new Map(this.groups.map((g, k) => [g.name, k])),
      left = ranked.filter(name => !own.has(name));
    if (left.length)
      this.groups.push({
        name: `${left.length} other ${by}s`,
        colour: palette.rest,
        bytes: left.reduce((t, name) => t + sums.get(name), 0),
      });
    for (let i = 0; i < plan.n; i++) this.group[i] = index.get(names.get(column[i])) ?? this.groups.length - 1;
    this.off = new Set();
    this.filter();
  }

  get filtered() {
    return Boolean(this.wanted || this.module !== null || this.off.size);
  }

  within(module) {
    return (
      this.module === null || (this.module ? module === this.module || module.startsWith(this.module + ".") : !module)
    );
  }

  filter() {
    const { plan } = this,
      { words } = plan,
      wanted = this.wanted.toLowerCase();
    const has = wanted ? words.map(w => w.toLowerCase().includes(wanted)) : null,
      inside = words.map(w => this.within(w));
    const shown = this.groups.map(g => !this.off.has(g.name));
    for (let i = 0; i < plan.n; i++)
      this.mask[i] =
        shown[this.group[i]] &&
        inside[plan.module[i]] &&
        (!has ||
          has[plan.kind[i]] ||
          has[plan.module[i]] ||
          has[plan.source[i]] ||
          has[plan.op[i]] ||
          has[plan.tensor[i]] ||
          plan.ids[i].toLowerCase().includes(wanted))
          ? 1
          : 0;
  }

  // The pixel of each group: first as it is, then dimmed into the background.
  pixels() {
    const back = rgb(css("--card"));
    return this.groups.map(({ colour }) => {
      const c = rgb(colour);
      return [pack(c), pack(c.map((v, k) => Math.round(v * DIMMED + back[k] * (1 - DIMMED))))];
    });
  }

  colour(i) {
    return this.groups[this.group[i]].colour;
  }
}

// The legend: a button for each colour, which dims what has it.
function legend(node, look, changed) {
  node.replaceChildren();
  for (const group of look.groups.filter(g => g.bytes)) {
    const item = add(node, "button");
    add(item, "i", "", "swatch").style.background = group.colour;
    add(item, "span", group.name);
    item.setAttribute("aria-pressed", String(!look.off.has(group.name)));
    item.title = `${bytes(group.bytes)} in all; press to dim or to show`;
    item.onclick = () => {
      if (!look.off.delete(group.name)) look.off.add(group.name);
      item.setAttribute("aria-pressed", String(!look.off.has(group.name)));
      changed();
    };
  }
}
