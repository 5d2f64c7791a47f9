// The page of two plans: their arenas side by side, and what changed.
const MOST = 300;
const click = id => () => {
  $(id).click();
};
const keys = [
  ["+", "zoom in", click("in")],
  ["=", "zoom in", click("in")],
  ["-", "zoom out", click("out")],
  ["0", "show all", click("reset")],
  ["c", "clear the filter", click("clear")],
  ["/", "find", () => $("find").focus()],
  ["l", "zoom both, or each on its own", click("linked")],
  ["← → ↑ ↓", "move the picture that has the focus; walk through a list"],
  ...["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].map(key => [
    key,
    "",
    e => arenas.some(a => a.arena === e.target && a.key(key)),
  ]),
];
let arenas = [];
frame(data, keys);

const plans = await Promise.all(data.plans.map(p => Plan.read(p)));
const { mates, changes, moves } = compare(plans, unpackColumns(await inflate(data.pairs), data.columns));
const looks = plans.map((plan, side) => ChangeLook.of(plan, changes[side]));
looks[1].off = looks[0].off; // one legend
looks[0].groups.forEach((group, k) => {
  group.bytes += looks[1].groups[k].bytes;
});
const extent = { steps: Math.max(...plans.map(p => p.STEPS)), bytes: Math.max(...plans.map(p => p.ARENA)) };
const pinned = []; // [side, buffer]

const nameOf = (side, i) =>
  [changes[side][i], moves[side][i]]
    .filter((change, k) => !k || change !== SAME)
    .map(change => CHANGES[change][0])
    .join(", ");

function describe(side, i) {
  const other = plans[1 - side],
    mate = mates[side][i],
    name = nameOf(side, i),
    texts = plans[side].describe(i);
  if (mate < 0)
    return [...texts, name === "came" ? "came: there is no such buffer before" : "went: there is no such buffer after"];
  const delta = plans[1].size[side ? i : mate] - plans[0].size[side ? mate : i],
    there = `${other.ids[mate]}, steps ${exact(other.start[mate])} to ${exact(other.end[mate] - 1)}`;
  return [...texts, `${name}${delta ? `, ${signed(delta)}` : ""}; ${side ? "before" : "after"}: ${there}`];
}

function showMate(side, i) {
  arenas[1 - side].mates = i >= 0 && mates[side][i] >= 0 ? [mates[side][i]] : [];
  arenas[1 - side].paintOver();
}

function pin(side, i) {
  // A pair is pinned once, as what it is now.
  if (side === 0 && mates[0][i] >= 0) [side, i] = [1, mates[0][i]];
  const at = pinned.findIndex(([s, k]) => s === side && k === i);
  if (at >= 0) pinned.splice(at, 1);
  else pinned.push([side, i]);
  showPins();
}

function showPins() {
  $("pins").replaceChildren();
  arenas.forEach((arena, side) => {
    arena.pins = [];
    for (const [s, i] of pinned) {
      const there = s === side ? i : mates[s][i];
      arena.pins.push(there);
    }
  });
  pinned.forEach(([side, i], k) =>
    pinCard(plans[side], i, String(k + 1), describe(side, i), {
      close: () => pin(side, i),
      zoom: () => arenas[side].show(i),
      only: module => only(pattern(module)),
    }),
  );
  for (const arena of arenas) arena.paintOver();
  save();
}

function only(module) {
  for (const look of looks) look.module = look.module === module ? null : module;
  filtered();
}

function filtered() {
  for (const look of looks) look.filter();
  $("clear").hidden = !looks[0].filtered;
  for (const row of $("modules").children) row.classList.toggle("on", row.dataset.module === looks[0].module);
  for (const arena of arenas) arena.draw();
  list();
  save();
}

function save() {
  writeHash(() => {
    const v = arenas[0].view,
      f = arenas[0].full(),
      whole = v.x0 === f.x0 && v.x1 === f.x1 && v.y0 === f.y0 && v.y1 === f.y1;
    return {
      view: whole ? "" : [v.x0, v.x1, v.y0, v.y1].map(n => Number(n.toFixed(2))).join(","),
      find: looks[0].wanted,
      module: moduleText(looks[0].module),
      off: joined([...looks[0].off]),
      pins: joined(pinned.map(([side, i]) => (side ? "+" : "-") + plans[side].ids[i])),
    };
  });
}

function restore({ view = "", find = "", module = null, off = "", pins = "" }) {
  const v = view.split(",").map(Number);
  $("find").value = find;
  looks[0].off.clear();
  if (off) for (const name of parted(off)) if (CHANGES.some(([change]) => change === name)) looks[0].off.add(name);
  for (const look of looks) {
    look.wanted = find;
    look.module = moduleOf(module);
  }
  if (v.length === 4 && v.every(Number.isFinite) && v[1] > v[0] && v[3] > v[2])
    for (const arena of arenas) arena.setView({ x0: v[0], x1: v[1], y0: v[2], y1: v[3] }, true);
  pinned.length = 0;
  if (pins)
    for (const name of parted(pins)) {
      const side = name[0] === "+" ? 1 : 0,
        i = plans[side].ids.indexOf(name.slice(1));
      if (i >= 0) pinned.push([side, i]);
    }
}

// The buffers that changed, the largest change first; those of the filter.
function changed() {
  const found = [];
  plans.forEach((plan, side) => {
    for (let i = 0; i < plan.n; i++) {
      const change = changes[side][i];
      if (change === SAME || !looks[side].mask[i] || (side === 0 && change !== WENT)) continue; // a pair is listed as what it is now
      const was = change === CAME ? 0 : change === WENT ? plan.size[i] : plans[0].size[mates[1][i]],
        is = change === WENT ? 0 : plan.size[i];
      found.push({ side, i, change, was, is });
    }
  });
  return found.sort((a, b) => Math.abs(b.is - b.was) - Math.abs(a.is - a.was) || b.is - a.is);
}

const sign = n => (n > 0 ? "num more" : n < 0 ? "num less" : "num");

function list() {
  const found = changed();
  $("listed").textContent = found.length
    ? `${plural(found.length, "buffer")} changed` + (found.length > MOST ? `, the ${MOST} largest shown` : "")
    : "No buffer changed";
  $("rows").replaceChildren();
  for (const { side, i, change, was, is } of found.slice(0, MOST)) {
    const row = add($("rows"), "tr"),
      plan = plans[side],
      w = name => plan.word(name, i),
      name = add(row, "td");
    add(name, "i", "", "swatch").style.background = CHANGES[change][1];
    add(name, "span", " " + nameOf(side, i));
    add(row, "td", is === was ? "0 B" : signed(is - was), sign(is - was));
    add(row, "td", change === CAME ? "" : bytes(was), "num");
    add(row, "td", change === WENT ? "" : bytes(is), "num");
    for (const [text, cls] of [
      [w("kind"), ""],
      [w("tensor"), ""],
      [w("module"), "wrap"],
      [w("source"), ""],
    ])
      add(row, "td", text, cls);
    add(row, "td", shortOp(w("op")));
    add(row, "td", plan.ids[i]);
    const show = () => {
      arenas[side].show(i);
      showMate(side, i);
      arenas[side].arena.scrollIntoView({ block: "center" });
    };
    focusable(row, show, () => pin(side, i));
  }
}

// A row that is reached by the keyboard: arrows walk, Enter acts, Space pins.
function focusable(row, enter, space) {
  row.tabIndex = row.previousElementSibling ? -1 : 0;
  row.onclick = e => {
    if (!e.target.closest("a")) enter();
  };
  row.onkeydown = e => {
    const go = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[e.key];
    if (e.target !== row) return;
    if (go) {
      row.tabIndex = -1;
      go.tabIndex = 0;
      go.focus();
    } else if (e.key === "Enter") enter();
    else if (e.key === " ") space();
    else return;
    e.preventDefault();
  };
}

arenas = plans.map(
  (plan, side) =>
    new Arena(
      $(`stage${side}`),
      plan,
      looks[side],
      {
        hover: (i, e) => {
          showMate(side, i);
          if (i < 0) hideTip();
          else tip(e, describe(side, i));
        },
        pick: i => {
          hideTip();
          pin(side, i);
        },
        view: () => {
          if ($("linked").checked) arenas[1 - side].setView(arenas[side].view, true);
          save();
        },
        step: (e, step) => {
          arenas[1 - side].hover(-1, step);
          tip(e, [
            `${bytes(plan.live[step])} live (${exact(plan.live[step])} B)`,
            `step ${exact(step)}`,
            plan.opText(step),
          ]);
        },
        at: () => {},
        leave: () => {
          hideTip();
          showMate(side, -1);
          arenas[1 - side].hover(-1);
        },
      },
      extent,
    ),
);
data.names.forEach((name, side) => {
  $(`name${side}`).textContent = name;
});
for (const cells of data.totals) {
  const row = add($("totals"), "tr");
  cells.forEach((text, k) => add(row, "td", text, k ? "num" : ""));
}
for (const [name, cls] of [
  ["module", ""],
  ["before", "num"],
  ["after", "num"],
  ["change", "num"],
  ...CHANGES.slice(1).map(([name]) => [name, "num"]),
])
  add($("modulehead"), "th", name, cls).scope = "col";
for (const {
  name,
  bytes: [was, is],
  counts,
} of byModule(plans, changes, moves)) {
  const row = add($("modules"), "tr");
  add(row, "td", name || "no module", "wrap");
  add(row, "td", bytes(was), "num");
  add(row, "td", bytes(is), "num");
  add(row, "td", is === was ? "same" : signed(is - was), sign(is - was));
  for (const count of counts.slice(1)) add(row, "td", count ? exact(count) : "", "num");
  row.dataset.module = name;
  focusable(
    row,
    () => only(name),
    () => only(name),
  );
}
for (const [name, cls] of [
  ["change", ""],
  ["bytes", "num"],
  ["before", "num"],
  ["after", "num"],
  ["kind", ""],
  ["tensor", ""],
  ["module", ""],
  ["source", ""],
  ["op", ""],
  ["name", ""],
])
  add($("head"), "th", name, cls).scope = "col";
const both = run => () => {
  if ($("linked").checked) run(arenas[0]);
  else arenas.forEach(run);
};
$("in").onclick = both(a => a.centre(0.6));
$("out").onclick = both(a => a.centre(1 / 0.6));
$("reset").onclick = () => arenas.forEach(a => a.reset());
$("find").oninput = e => {
  for (const look of looks) look.wanted = e.target.value.trim();
  filtered();
};
$("clear").onclick = () => {
  $("find").value = "";
  for (const look of looks) {
    look.wanted = "";
    look.module = null;
    look.off.clear();
  }
  showLegend();
  filtered();
};
function showLegend() {
  legend($("legend"), looks[0], filtered);
}
restore(readHash());
showLegend();
for (const arena of arenas) arena.paint();
performance.mark("memplan-painted");
filtered();
showPins();
addEventListener("hashchange", () => {
  restore(readHash());
  showLegend();
  filtered();
  showPins();
});
window.memplan = {
  plans,
  arenas,
  looks,
  changes,
  mates,
  moves,
  changed,
  views: () => arenas.map(a => ({ ...a.view })),
  place: (side, i) => arenas[side].place(i),
  index: (side, name) => plans[side].ids.indexOf(name),
  pin,
};
