// The page of budgets: the curve of total against time, the tables, and the plan that a point opens.
const percent = share => `+${Number((share * 100).toPrecision(4))} %`,
  SVG = "http://www.w3.org/2000/svg";
let report = null,
  opened = null;

frame(
  data,
  reportKeys(() => report),
);

function draw(parent, tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function plot() {
  const w = Math.max($("plot").clientWidth, 280),
    h = w < 600 ? 380 : 500,
    left = 74,
    right = 18,
    up = 16,
    down = 62;
  const x = total => left + ((w - left - right) * total) / data.right,
    y = overhead => h - down - ((h - up - down) * Math.min(overhead, data.top)) / data.top;
  $("plot").replaceChildren();
  const svg = draw($("plot"), "svg", { viewBox: `0 0 ${w} ${h}`, role: "group", "aria-label": data.title });
  const every = w < 600 ? 2 : 1;
  for (let k = every; k <= 10 && data.eager; k += every) {
    const at = x((data.eager * k) / 10);
    if (at > w - right) break;
    draw(svg, "path", { class: "grid", d: `M${at} ${up}V${h - down}` });
    draw(svg, "text", { x: at, y: h - down + 18, "text-anchor": "middle" }, `${k * 10} %`);
    if (w >= 900) draw(svg, "text", { x: at, y: h - down + 33, "text-anchor": "middle" }, bytes((data.eager * k) / 10));
  }
  const step =
    [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50].find(s => data.top / s <= 8) ||
    data.top;
  for (let k = 0; k * step <= data.top; k++) {
    draw(svg, "path", { class: "grid", d: `M${left} ${y(k * step)}H${w - right}` });
    draw(svg, "text", { x: left - 8, y: y(k * step) + 4, "text-anchor": "end" }, percent(k * step));
  }
  draw(
    svg,
    "text",
    { x: (left + w - right) / 2, y: h - 8, "text-anchor": "middle" },
    w < 600 ? "total on the device, of eager's" : "total on the device: share of the predicted eager total, bytes",
  );
  draw(
    svg,
    "text",
    { x: 0, y: 0, "text-anchor": "middle", transform: `translate(14 ${(h - down + up) / 2}) rotate(-90)` },
    w < 600 ? "added time of a step, %" : "predicted time of a step, % over no budget",
  );
  if (data.points.length)
    draw(svg, "path", { class: "curve", d: "M" + data.points.map(p => `${x(p.total)} ${y(p.overhead)}`).join("L") });
  for (const p of data.points) point(svg, x(p.total), y(p.overhead), p);
  mark();
}

function point(svg, x, y, p) {
  const opens = p.plan !== null && p.plan !== undefined,
    node = draw(svg, "circle", {
      class: `point ours${opens ? "" : " still"}`,
      cx: x,
      cy: y,
      r: 6,
      tabindex: 0,
      role: opens ? "button" : "img",
      "aria-label": p.about.filter(Boolean).join(", "),
    });
  if (opens) node.dataset.plan = p.plan;
  const about = e => {
    const r = node.getBoundingClientRect();
    tip({ clientX: e.clientX || r.right, clientY: e.clientY || r.bottom }, p.about);
  };
  for (const event of ["pointermove", "focus"]) node.addEventListener(event, about);
  for (const event of ["pointerleave", "blur"]) node.addEventListener(event, hideTip);
  if (!opens) return;
  node.addEventListener("click", () => open(p));
  node.addEventListener("keydown", e => {
    if (e.key === "Enter" || e.key === " ") {
      open(p);
      e.preventDefault();
    }
  });
}

function mark() {
  for (const node of document.querySelectorAll("#plot .point"))
    node.classList.toggle("on", opened !== null && node.dataset.plan === String(opened.plan));
  for (const row of document.querySelectorAll("tr[data-row]"))
    row.classList.toggle("on", opened !== null && Number(row.dataset.row) === opened.row);
}

async function open(p) {
  shut();
  opened = p;
  mark();
  const plan = await Plan.read(data.plans[p.plan]);
  if (opened !== p) return; // another one was opened meanwhile
  $("openedtitle").textContent = p.about[0];
  $("report").replaceChildren($("template").content.cloneNode(true));
  $("opened").hidden = false;
  report = new Report(plan, { address: false });
  for (const inner of $("report").querySelectorAll("section")) inner.classList.remove("card");
  writeHash(() => ({ budget: p.row }));
  $("opened").scrollIntoView({ block: "start" });
}

function shut() {
  report?.close();
  report = opened = null;
  $("report").replaceChildren();
  $("opened").hidden = true;
  mark();
  writeHash(() => ({}));
}

$("close").onclick = shut;
for (const [section, k] of data.sections.map((s, k) => [s, k])) {
  const card = add($("sections"), "section", undefined, "card");
  if (section.heading) add(card, "h2", section.heading);
  for (const line of k ? section.lines : []) add(card, "div", line);
  const table = add(add(card, "div", undefined, "scroll"), "table"),
    head = add(add(table, "thead"), "tr"),
    body = add(table, "tbody");
  for (const [name, numeric] of section.columns) add(head, "th", name, numeric ? "num" : "").scope = "col";
  section.rows.forEach((cells, r) => {
    const row = add(body, "tr"),
      p = k === 0 ? data.points.find(p => p.row === r && p.plan !== null) : undefined;
    cells.forEach((text, c) => add(row, "td", text, section.columns[c][1] ? "num" : ""));
    if (k === 0) row.dataset.row = r;
    if (!p) return;
    row.tabIndex = 0;
    row.onclick = () => open(p);
    row.onkeydown = e => {
      if (e.key === "Enter") open(p);
    };
  });
}
{
  const item = add($("plotlegend"), "span"),
    svg = draw(item, "svg", { width: 12, height: 12 });
  item.style.cssText = "display:inline-flex;gap:6px;align-items:center;padding:2px 8px";
  item.className = "plot";
  svg.style.width = "12px";
  draw(svg, "circle", { class: "ours", cx: 6, cy: 6, r: 5 });
  add(item, "span", `memplan (${data.policy})`);
}
let wide = 0;
new ResizeObserver(() => {
  if ($("plot").clientWidth !== wide) {
    wide = $("plot").clientWidth;
    plot();
  }
}).observe($("plot"));
plot();
const asked = data.points.find(p => String(p.row) === readHash().budget && p.plan !== null);
if (asked) await open(asked);
performance.mark("memplan-painted");
window.memplan = { data, opened: () => report };
