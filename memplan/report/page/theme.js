// What every page has: light and dark, print, the tooltip, the dialog of keys, texts of the frame.

const dark = () => document.documentElement.dataset.theme === "dark";

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  document.dispatchEvent(new Event("memplan-theme"));
}

// The lines of a tooltip: the first one bold, all after the second dim.
function lines(node, texts) {
  texts.filter(Boolean).forEach((text, i) => add(node, i ? "div" : "b", text, i > 1 ? "dim" : ""));
}

function tip(event, texts) {
  const node = $("tip");
  node.replaceChildren();
  lines(node, texts);
  node.style.display = "block";
  const r = node.getBoundingClientRect();
  node.style.left = Math.max(Math.min(event.clientX + 16, innerWidth - r.width - 8), 8) + "px";
  node.style.top = Math.max(Math.min(event.clientY + 16, innerHeight - r.height - 8), 8) + "px";
}

const hideTip = () => {
  $("tip").style.display = "none";
};

// `keys` are [key, what it does, function]; a key without a function is handled elsewhere.
function frame(data, keys) {
  document.title = "memplan: " + data.title;
  $("title").textContent = data.title;
  for (const line of data.answer) add($("verdict"), "div", line);
  $("foot").textContent = data.foot;
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  document.documentElement.dataset.theme = preferred.matches ? "dark" : "light";
  preferred.addEventListener("change", e => setTheme(e.matches ? "dark" : "light"));
  $("theme").onclick = () => setTheme(dark() ? "light" : "dark");
  let before = null; // the theme before printing, which is on paper
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    setTheme("light");
  });
  addEventListener("afterprint", () => {
    if (before) setTheme(before);
  });
  const all = [
    ...keys,
    ["t", "light or dark", () => $("theme").click()],
    ["?", "these keys", () => $("keys").showModal()],
  ];
  for (const [key, what] of all.filter(([, what], k) => what && all[k - 1]?.[1] !== what)) {
    add(add($("keylist"), "dt"), "kbd", key);
    add($("keylist"), "dd", what);
  }
  $("help").onclick = () => $("keys").showModal();
  document.addEventListener("keydown", e => {
    if (
      e.ctrlKey ||
      e.metaKey ||
      e.altKey ||
      e.defaultPrevented ||
      $("keys").open ||
      e.target.closest?.("input, select, textarea")
    )
      return;
    const found = all.find(([key, , run]) => run && key === e.key);
    if (found && found[2](e) !== false) e.preventDefault();
  });
}
