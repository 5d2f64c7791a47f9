// How numbers, names and texts are written; nothing here touches a picture.
const $ = id => document.getElementById(id);
const exact = n => n.toLocaleString("en-US");

function bytes(n) {
  const size = Math.abs(n),
    units = ["KiB", "MiB", "GiB", "TiB", "PiB"];
  if (size < 1024) return Math.round(n) + " B";
  let i = -1,
    m = size;
  do {
    m /= 1024;
    i++;
  } while (m >= 1024 && i < units.length - 1);
  return (n < 0 ? "-" : "") + m.toFixed(m < 100 ? 2 : 1) + " " + units[i];
}

const signed = n => (n > 0 ? "+" : "") + bytes(n);
const shortOp = op => op.replace(/\.default$/, "");
const plural = (n, what) => `${exact(n)} ${what}${n === 1 ? "" : "s"}`;
// "h.0.mlp" and "h.11.mlp" are both "h.*.mlp".
const pattern = module => module.replace(/(^|[.[])\d+(?=[.\]]|$)/g, "$1*");

// Round numbers from `from` to `to`, at most `count` of them.
function ticks(from, to, count, factors) {
  let step = 1,
    i = 0;
  while (step * count < to - from) step = Math.round(step * factors[i++ % factors.length]);
  const found = [];
  for (let t = Math.ceil(Math.max(from, 0) / step) * step; t <= to; t += step) found.push(t);
  return found;
}

// Write a dotted name whose lines break after dots.
function dotted(node, name) {
  name.split(/(?<=\.)/).forEach((part, k) => {
    if (k) node.append(document.createElement("wbr"));
    node.append(part);
  });
}

function add(parent, tag, text, cls) {
  const node = document.createElement(tag);
  if (cls === "wrap" && text) dotted(node, text);
  else if (text !== undefined) node.textContent = text;
  if (cls) node.className = cls;
  parent.append(node);
  return node;
}
