// The tree of modules beside the arena, with their bytes at the peak; the one that is chosen filters the page.

function moduleTree(plan) {
  const root = { name: "", path: null, bytes: 0, inner: new Map() },
    none = { name: "no module", path: "", bytes: 0, inner: new Map() },
    chains = new Map();
  for (let i = 0; i < plan.n; i++) {
    let chain = chains.get(plan.module[i]);
    if (!chain) {
      const module = plan.words[plan.module[i]];
      chain = [root];
      if (module)
        for (const part of module.split(".")) {
          const node = chain[chain.length - 1];
          if (!node.inner.has(part))
            node.inner.set(part, {
              name: part,
              path: node.path === null ? part : `${node.path}.${part}`,
              bytes: 0,
              inner: new Map(),
            });
          chain.push(node.inner.get(part));
        }
      else chain.push(none);
      chains.set(plan.module[i], chain);
    }
    if (plan.aliveAt(i, plan.data.peakStep)) for (const node of chain) node.bytes += plan.size[i];
  }
  if ([...chains.values()].some(chain => chain[1] === none)) root.inner.set("\0", none);
  return root;
}

class Tree {
  constructor(node, plan, chosen) {
    Object.assign(this, { node, chosen, most: 1, rows: [] });
    const root = moduleTree(plan);
    this.most = Math.max(root.bytes, 1);
    this.rows = [];
    this.level(node, root, 0);
    node.addEventListener("keydown", e => this.key(e));
  }

  level(parent, node, depth) {
    const inner = [...node.inner.values()].sort(
      (a, b) => b.bytes - a.bytes || a.name.localeCompare(b.name, "en", { numeric: true }),
    );
    const named = inner.filter(child => child.path !== "").length;
    for (const child of inner) {
      const item = add(parent, "li"),
        row = add(item, "div", undefined, "node");
      item.setAttribute("role", "none");
      row.setAttribute("role", "treeitem");
      row.tabIndex = this.rows.length ? -1 : 0;
      const twist = add(row, "span", child.inner.size ? "▸" : "", "twist");
      add(row, "span", child.name, "name");
      add(row, "span", bytes(child.bytes), "bytes");
      add(row, "span", "", "share").style.width = `calc(${child.bytes / this.most} * (100% - 16px))`;
      const found = { row, path: child.path, open: null };
      if (child.inner.size) {
        let list = null;
        row.setAttribute("aria-expanded", "false");
        found.open = wide => {
          if (wide && !list) {
            list = add(item, "ul");
            list.setAttribute("role", "group");
            this.level(list, child, depth + 1);
          }
          if (list) list.hidden = !wide;
          row.setAttribute("aria-expanded", String(wide));
          twist.textContent = wide ? "▾" : "▸";
        };
        twist.onclick = e => {
          e.stopPropagation();
          found.open(row.getAttribute("aria-expanded") !== "true");
        };
        if (named === 1 && depth < 4) found.open(true);
      }
      row.onclick = () => this.choose(child.path);
      this.rows.push(found);
    }
  }

  choose(path) {
    this.mark(path);
    this.chosen(path);
  }

  // Show which module is chosen (null: none), with all above it open.
  mark(path) {
    if (path)
      for (let at = path.indexOf("."); at >= 0; at = path.indexOf(".", at + 1))
        this.rows.find(r => r.path === path.slice(0, at))?.open?.(true);
    for (const r of this.rows) {
      r.row.classList.toggle("on", r.path === path);
      r.row.setAttribute("aria-selected", String(r.path === path));
    }
  }

  key(e) {
    const shown = [...this.node.querySelectorAll(".node")].filter(row => row.offsetParent),
      at = shown.indexOf(document.activeElement),
      found = this.rows.find(r => r.row === shown[at]);
    const go = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: shown.length - 1 }[e.key];
    if (!found) return;
    if (go !== undefined) {
      const row = shown[go];
      if (row) {
        shown[at].tabIndex = -1;
        row.tabIndex = 0;
        row.focus();
      }
    } else if (e.key === "ArrowRight") found.open?.(true);
    else if (e.key === "ArrowLeft") found.open?.(false);
    else if (e.key === "Enter" || e.key === " ") found.row.click();
    else return;
    e.preventDefault();
  }
}
