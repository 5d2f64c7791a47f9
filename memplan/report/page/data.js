// The content of a picture, unpacked: a column of numbers for each property of the buffers, no object for each buffer.

async function inflate(text) {
  const packed = atob(text),
    raw = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) raw[i] = packed.charCodeAt(i);
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Undo `pack` of memplan/report/packed.py: byte planes, lowest first; a delta is kept as 2d, or as -2d - 1 below zero.
function unpackColumns(raw, columns) {
  const found = {};
  let at = 0;
  for (const [name, count, width, delta] of columns) {
    const column = new Float64Array(count);
    for (let plane = 0, scale = 1; plane < width; plane++, scale *= 256, at += count)
      for (let i = 0; i < count; i++) column[i] += raw[at + i] * scale;
    if (delta) {
      let value = 0;
      for (let i = 0; i < count; i++) {
        const d = column[i];
        value += d % 2 ? -(d + 1) / 2 : d / 2;
        column[i] = value;
      }
    }
    found[name] = column;
  }
  return found;
}

class Plan {
  static async read(data) {
    const [raw, texts] = await Promise.all([inflate(data.packed), inflate(data.texts)]);
    return new Plan(data, unpackColumns(raw, data.columns), JSON.parse(new TextDecoder().decode(texts)));
  }

  constructor(data, columns, texts) {
    Object.assign(this, columns, {
      data,
      ids: texts.ids,
      arrows: texts.arrows,
      words: data.words,
      n: texts.ids.length,
    });
    this.STEPS = Math.max(data.steps, 1);
    this.ARENA = Math.max(data.arena, 1);
    this.TOP = Math.max(data.arena, data.maxLive, 1);
    this.gapFrom = new Uint32Array(this.n + 1);
    for (let i = 0; i < this.n; i++) this.gapFrom[i + 1] = this.gapFrom[i] + columns.gaps[i];
    this.live = this.bytesAlive();
    this.arrowsOf = new Map();
    for (const arrow of this.arrows)
      for (const i of new Set([arrow[6], arrow[7]])) this.arrowsOf.set(i, [...(this.arrowsOf.get(i) || []), arrow]);
  }

  // Live bytes at each step.
  bytesAlive() {
    const live = new Float64Array(this.STEPS + 1);
    for (let i = 0; i < this.n; i++)
      for (const [s, e] of this.segments(i)) {
        live[s] += this.size[i];
        live[e] -= this.size[i];
      }
    for (let s = 1; s <= this.STEPS; s++) live[s] += live[s - 1];
    return live;
  }

  // The steps [from, to) during which buffer i is in the arena; between two of them it is evicted.
  segments(i) {
    const found = [];
    let from = this.start[i];
    for (let k = this.gapFrom[i]; k < this.gapFrom[i + 1]; k++) {
      found.push([from, this.gapStart[k]]);
      from = this.gapEnd[k];
    }
    found.push([from, this.end[i]]);
    return found;
  }

  aliveAt(i, step) {
    if (step < this.start[i] || step >= this.end[i]) return false;
    for (let k = this.gapFrom[i]; k < this.gapFrom[i + 1]; k++)
      if (step >= this.gapStart[k] && step < this.gapEnd[k]) return false;
    return true;
  }

  word(column, i) {
    return this.words[this[column][i]];
  }

  opText(step) {
    if (!(step in this.opTarget)) return "";
    const module = this.words[this.opModule[step]];
    return [
      this.opBackward[step] ? "backward" : "forward",
      shortOp(this.words[this.opTarget[step]]),
      module && "in " + module,
    ]
      .filter(Boolean)
      .join(" ");
  }

  // The lines of a tooltip: the size, the name, then where it is from and when it is there.
  describe(i) {
    const w = column => this.word(column, i),
      away = this.gapFrom[i + 1] - this.gapFrom[i];
    return [
      `${bytes(this.size[i])} (${exact(this.size[i])} B)`,
      this.ids[i] + (w("kind") ? `, ${w("kind")}` : ""),
      w("tensor") && "tensor " + w("tensor"),
      w("module") && "module " + w("module"),
      w("source") && "source " + w("source"),
      w("op") && "op " + w("op"),
      `steps ${exact(this.start[i])} to ${exact(this.end[i] - 1)}` + (away ? `, evicted ${plural(away, "time")}` : ""),
      `offset ${exact(this.offset[i])} B`,
      ...(this.arrowsOf.get(i) || []).slice(0, 2).map(a => a[5]),
    ].filter(Boolean);
  }
}
