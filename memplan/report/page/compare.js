// What became of the buffers of two plans: they came, went, grew, shrank, moved to the peak or left it.
const CHANGES = [
  ["unchanged", "#6b7079"],
  ["came", "#2a7d3f"],
  ["went", "#cc2f2a"],
  ["grew", "#b8520f"],
  ["shrank", "#0b7c8e"],
  ["moved to the peak", "#8d4cc7"],
  ["left the peak", "#2f6fd8"],
];
const [SAME, CAME, WENT, GREW, SHRANK, TO_PEAK, OFF_PEAK] = CHANGES.keys();

class ChangeLook extends Look {
  // `change` is that of each buffer: an index into CHANGES.
  static of(plan, change) {
    const look = new ChangeLook(plan);
    look.groups = CHANGES.map(([name, colour]) => ({ name, colour, bytes: 0 }));
    look.group.set(change);
    for (let i = 0; i < plan.n; i++) look.groups[change[i]].bytes += plan.size[i];
    look.filter();
    return look;
  }

  // A module here is a pattern, such as "h.*.mlp".
  within(module) {
    return this.module === null || pattern(module) === this.module;
  }
}

// What became of a pair: of its size, and of whether it is alive at the peak.
function changesOf(before, after, i, j) {
  const was = before.aliveAt(i, before.data.peakStep),
    is = after.aliveAt(j, after.data.peakStep),
    delta = after.size[j] - before.size[i];
  return [delta > 0 ? GREW : delta < 0 ? SHRANK : SAME, is === was ? SAME : is ? TO_PEAK : OFF_PEAK];
}

function compare([before, after], pairs) {
  const mates = [new Int32Array(before.n).fill(-1), new Int32Array(after.n).fill(-1)],
    changes = [new Uint8Array(before.n).fill(WENT), new Uint8Array(after.n).fill(CAME)],
    moves = [new Uint8Array(before.n), new Uint8Array(after.n)];
  for (let k = 0; k < pairs.before.length; k++) {
    const i = pairs.before[k],
      j = pairs.after[k];
    mates[0][i] = j;
    mates[1][j] = i;
    const [grown, moved] = changesOf(before, after, i, j);
    changes[0][i] = changes[1][j] = grown || moved; // its colour
    moves[0][i] = moves[1][j] = grown ? moved : SAME; // what its colour does not say
  }
  return { mates, changes, moves };
}

// Rows of modules without layer numbers: their bytes at the peak before and after, and how many buffers changed how.
function byModule(plans, changes, moves) {
  const rows = new Map(),
    names = plans.map(plan => plan.words.map(pattern));
  plans.forEach((plan, side) => {
    for (let i = 0; i < plan.n; i++) {
      const name = names[side][plan.module[i]];
      let row = rows.get(name);
      if (!row) rows.set(name, (row = { name, bytes: [0, 0], counts: CHANGES.map(() => 0) }));
      if (plan.aliveAt(i, plan.data.peakStep)) row.bytes[side] += plan.size[i];
      if (side === 0 && changes[0][i] !== WENT) continue; // a pair counts once
      row.counts[changes[side][i]]++;
      if (moves[side][i] !== SAME) row.counts[moves[side][i]]++;
    }
  });
  return [...rows.values()].sort(
    (a, b) =>
      Math.abs(b.bytes[1] - b.bytes[0]) - Math.abs(a.bytes[1] - a.bytes[0]) ||
      Math.max(...b.bytes) - Math.max(...a.bytes),
  );
}
