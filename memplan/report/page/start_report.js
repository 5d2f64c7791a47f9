let report = null;
frame(
  data,
  reportKeys(() => report),
);
const plan = await Plan.read(data);
report = new Report(plan);
// For tests and curious people.
window.memplan = {
  plan,
  report,
  view: () => ({ ...report.arena.view }),
  index: name => plan.ids.indexOf(name),
  show: i => report.arena.show(i),
  place: i => report.arena.place(i),
};
