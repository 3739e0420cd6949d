// The lineage of the models: a row for each model, as thick as its share of clients, from its creation to its end.
const MAX_ROWS = 22;

function lineageChart(maps, { width, left }) {
  const { run, n, T, cells, shade } = maps,
    lives = new Map();
  const life = (m) =>
    lives.get(m) ||
    lives.set(m, { m, born: null, end: null, from: null, into: null, users: new Array(T).fill(0), total: 0 }).get(m);
  cells.model.forEach((m, i) => {
    const l = life(m);
    l.users[Math.floor(i / n)] += 1;
    l.total += 1;
  });
  for (const e of run.events) {
    const l = life(e.model);
    if (e.kind === "created") {
      l.born = e.t;
      l.from = e.from ?? null;
      l.why = e.why;
    }
    if (e.kind === "merged") {
      l.end = e.t;
      l.into = e.into;
      l.gone = e.why;
    }
    if (e.kind === "retired") {
      l.left = e.t;
      l.gone = e.why;
    }
  }
  const all = [...lives.values()].filter((l) => l.total || l.born !== null),
    folded = fold(all, (m) => cells.roots[m] ?? m);
  const shown = folded
    .slice()
    .sort((a, b) => b.total - a.total || a.m - b.m)
    .slice(0, MAX_ROWS)
    .sort((a, b) => a.m - b.m);
  const row = new Map(shown.map((l, i) => [l.m, i]));
  const tall = shown.length > 12 ? 17 : 24,
    height = 14 + tall * shown.length + 24,
    wide = (width - left) / T;
  const x = (t) => left + wide * (t + 0.5),
    y = (m) => 12 + tall * (row.get(m) + 0.5) - 4;
  const svg = s("svg", {
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": `Lineage of ${count(all.length, "model")}`,
  });
  for (const l of shown) {
    const used = range(T).filter((t) => l.users[t]),
      born = l.born ?? (used.length ? used[0] : 0);
    const last = used.length ? used[used.length - 1] : born,
      fill = paint(shade.slot(l.m));
    const until = l.into !== null ? l.end : Math.max(last, born);
    const group = s(
      "g",
      {},
      s(
        "title",
        {},
        [
          l.many ? `${l.many} models` : `Model ${l.m}`,
          l.why && !l.many ? `created at time ${born + 1}: ${l.why}` : "",
          l.gone ? `${l.into !== null ? "merged" : "without users"} at time ${(l.end ?? l.left) + 1}: ${l.gone}` : "",
        ]
          .filter(Boolean)
          .join("\n"),
      ),
    );
    if (until > born)
      group.append(
        s("line", {
          x1: x(born),
          x2: x(until === l.end && row.has(l.into) ? until - 0.35 : until),
          y1: y(l.m),
          y2: y(l.m),
          stroke: fill,
          "stroke-width": 1.2,
          "stroke-dasharray": "1 3",
        }),
      );
    used.forEach((t) =>
      group.append(
        s(
          "rect",
          {
            x: x(t) - (t === l.born ? 3 : wide / 2),
            width: t === l.born ? wide / 2 + 3 : wide,
            rx: 1.5,
            fill,
            height: 3 + (tall - 9) * Math.sqrt(l.users[t] / n),
            y: y(l.m) - (3 + (tall - 9) * Math.sqrt(l.users[t] / n)) / 2,
          },
          s(
            "title",
            {},
            `${l.many ? `${l.many} models` : `Model ${l.m}`}, time ${t + 1}: ${count(l.users[t], "client")}`,
          ),
        ),
      ),
    );
    if (l.from !== null && row.has(l.from) && l.born !== null) {
      group.prepend(
        s("path", {
          d: thread(x(born) - wide * 0.5, y(l.from), x(born), y(l.m)),
          fill: "none",
          stroke: "var(--faint)",
          "stroke-width": 1,
        }),
      );
    }
    if (l.into !== null && row.has(l.into)) {
      const from = x(l.end) - wide * 0.5;
      group.append(
        s("path", {
          d: thread(from, y(l.m), x(l.end) - 3, y(l.into)),
          fill: "none",
          stroke: fill,
          "stroke-width": 2,
        }),
      );
    } else if (l.left !== undefined && last < T - 1 && l.into === null) {
      const cx = x(last) + wide / 2 + 3;
      group.append(s("path", { d: `M${cx},${y(l.m) - 4}v8`, stroke: fill, "stroke-width": 2 }));
    }
    if (l.born !== null)
      group.append(
        s("circle", { cx: x(born), cy: y(l.m), r: 4, fill: "var(--paper)", stroke: fill, "stroke-width": 2 }),
      );
    group.append(s("text", { x: left - 10, y: y(l.m) + 4, "text-anchor": "end" }, l.many ? `+${l.many}` : String(l.m)));
    svg.append(group);
  }
  for (const t of times(T, width - left, 30)) {
    const half = 3.6 * String(timeMark(t)).length;
    svg.append(s("text", { x: Math.min(x(t), width - half), y: height - 4, "text-anchor": "middle" }, timeMark(t)));
  }
  return { svg, hidden: folded.length - shown.length, all: all.length, folded: shown.some((l) => l.many) };
}

// A curve that is horizontal at both ends.
function thread(x0, y0, x1, y1) {
  const bend = (x1 - x0) * 0.75;
  return `M${x0},${y0}C${x0 + bend},${y0} ${x1 - bend},${y1} ${x1},${y1}`;
}

// Joins models with the same creation time, merge time and target into one row, if they are at least five.
function fold(lives, root) {
  const alike = new Map();
  for (const l of lives) {
    const name = l.into === null ? `model ${l.m}` : `${l.born} ${l.end} ${root(l.m)}`;
    alike.set(name, [...(alike.get(name) || []), l]);
  }
  return [...alike.values()].flatMap((group) =>
    group.length < 5
      ? group
      : [
          {
            ...group[0],
            many: group.length,
            into: root(group[0].m),
            users: group[0].users.map((_, t) => sum(group.map((l) => l.users[t]))),
            total: sum(group.map((l) => l.total)),
          },
        ],
  );
}

// Assigns one colour to a model and to all models that merged into it; the least used models share a colour.
function shades(run) {
  const { model, roots } = run.cells,
    used = new Map();
  const root = (m) => roots[m] ?? m;
  for (const m of model) used.set(root(m), (used.get(root(m)) || 0) + 1);
  const ranked = [...used]
    .sort((a, b) => b[1] - a[1] || a[0] - b[0])
    .slice(0, PALETTE)
    .map(([m]) => m)
    .sort((a, b) => a - b);
  const slot = new Map(ranked.map((m, i) => [m, i]));
  const values = range(PALETTE).map((i) => rgb(colour("m" + i))),
    rest = rgb(colour("other"));
  const part = [...new Set(model)].filter((m) => root(m) !== m);
  const named = ranked.map((m) => {
    const parts = part.filter((p) => root(p) === m);
    return [
      `model ${m}` +
        (parts.length ? ` (with ${parts.length <= 4 ? parts.join(", ") : `${parts.length} other models`} merged into it)` : ""),
      paint(slot.get(m)),
    ];
  });
  if (used.size > PALETTE) named.push([count(used.size - PALETTE, "other model"), "var(--other)"]);
  return {
    model: (m) => values[slot.get(root(m))] || rest,
    concept: (k) => values[k] || rest,
    slot: (m) => slot.get(root(m)) ?? -1,
    named,
  };
}
