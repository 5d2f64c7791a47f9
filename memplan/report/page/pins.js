// The details of a buffer that was clicked on: they stay, with links.
function pinCard(plan, i, tag, texts, { close, zoom, only }) {
  const card = add($("pins"), "div", undefined, "pin"),
    shut = add(card, "button", "×", "close"),
    module = plan.word("module", i);
  shut.setAttribute("aria-label", "Close");
  shut.onclick = close;
  add(card, "span", tag, "tag");
  lines(card, texts);
  const links = add(card, "div", undefined, "links");
  if (plan.link(i)) sourceLink(links, plan, i);
  add(links, "button", "zoom to it").onclick = zoom;
  if (module) add(links, "button", "only its module").onclick = () => only(module);
}

function sourceLink(parent, plan, i) {
  const link = add(parent, "a", plan.word("source", i));
  link.href = plan.link(i);
  link.target = "_blank";
  link.rel = "noopener noreferrer";
}
