// The details of a buffer that was clicked on: they stay.
function pinCard(plan, i, tag, texts, { close, zoom, only }) {
  const card = add($("pins"), "div", undefined, "pin"),
    shut = add(card, "button", "×", "close"),
    module = plan.word("module", i);
  shut.setAttribute("aria-label", "Close");
  shut.onclick = close;
  add(card, "span", tag, "tag");
  lines(card, texts);
  const buttons = add(card, "div", undefined, "buttons");
  add(buttons, "button", "zoom to it").onclick = zoom;
  if (module) add(buttons, "button", "only its module").onclick = () => only(module);
}
