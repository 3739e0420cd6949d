// The sections of the page, from top to bottom.

function lead() {
  const { run, stream, group, data } = view;
  const of = run.n_steps === null ? "" : ` of ${run.n_steps}`,
    status = run.status === "complete" ? "complete" : `${run.status}: ${run.steps}${of} time steps`;
  const n = sum(data.streams.flatMap((x) => x.groups.map((g) => g.runs.length)));
  fill(
    "eyebrow",
    [
      data.name,
      count(n, "run"),
      stream.options,
      `seed ${run.seed}`,
      count(stream.n_clients, "client"),
      run.n_steps === null && run.status !== "complete" ? null : count(run.n_steps || run.steps, "time step"),
      status,
      run.started.slice(0, 16).replace("T", " "),
    ]
      .filter(Boolean)
      .join("  ·  "),
  );
  fill("headline", `${group.label} on ${stream.short}`);
  fill("gist", gist(view));
  fill(
    "remarks",
    stream.remarks.map((text) => h("li", {}, text)),
  );
  fill("tiles", tiles(view));
}

function accuracy() {
  const { stream, group } = view,
    few = stream.groups.length <= 6;
  const ends = { Oracle: ["var(--ink)", "5 4"], Oblivious: ["var(--soft)", "2 4"] };
  const lines = stream.groups.map((g, i) => {
    const own = g === group,
      [stroke, dash] = ends[g.algorithm] || [
        few || view.strong.has(g.label) || own ? paint(own ? 0 : 1 + (i % 7)) : "var(--faint)",
        null,
      ];
    const strong = own || few || g.algorithm in ends || view.strong.has(g.label);
    return {
      name: g.label,
      values: g.mean,
      stroke: own ? "var(--m0)" : stroke,
      dash: own ? null : dash,
      strong,
      low: g.std && g.mean.map((v, t) => (known(v) && known(g.std[t]) ? v - g.std[t] : null)),
      high: g.std && g.mean.map((v, t) => (known(v) && known(g.std[t]) ? v + g.std[t] : null)),
    };
  });
  const room = roomFor(
    lines.filter((l) => l.strong).map((l) => l.name),
    300,
  );
  fill(
    "accuracy",
    lineChart(lines, {
      width: 1116,
      height: 330,
      right: room,
      label: `${heading()} over time by algorithm`,
      xlabel: "time",
      show: (v) => (score.share ? `${Math.round(100 * v)} %` : number(v)),
      floor: 0,
      ceiling: score.share ? 1.004 : null,
    }),
  );
  fill("h-accuracy", `${heading()} over time`);
  const seeds = [...new Set(stream.groups.map((g) => g.runs.length))].sort((a, b) => a - b);
  fill(
    "accuracy-note",
    "Mean over clients, on the time step after the one trained on. " +
      (seeds[seeds.length - 1] > 1
        ? `Lines are means over seeds (${seeds.join(" or ")}), bands one standard deviation.`
        : "One seed each."),
  );
  fill(
    "accuracy-legend",
    few
      ? []
      : stream.groups
          .filter((g) => g !== group && !(g.algorithm in ends))
          .map((g) =>
            h(
              "button",
              {
                type: "button",
                "aria-pressed": String(view.strong.has(g.label)),
                title: g.summary,
                onclick: () => {
                  view.strong.delete(g.label) || view.strong.add(g.label);
                  accuracy();
                },
              },
              g.label,
            ),
          ),
  );
}

function maps() {
  const { stream, run, maps: found } = view,
    n = stream.clients.length;
  $("below-map").hidden = $("map").hidden = !found;
  if (!found) {
    fill("map-controls");
    fill(
      "map-note",
      run.steps
        ? "Left out here to keep this page small: make a page of this run's record alone."
        : "No time step is done yet.",
    );
    return;
  }
  const sampled = isSample(stream)
    ? `Shown, and listed below, are ${n.toLocaleString("en")} of ${count(stream.n_clients, "client")}, drawn evenly; ` +
      "numbers and curves are of all of them. "
    : "";
  fill(
    "map-note",
    sampled +
      "A row is a client, a column a time step. Left: the model it used, models that merged in one colour. Right: " +
      (score.title === "accuracy" ? "how often that model was right" : `its ${score.title}`) +
      " on the next step. " +
      (n > 60 ? "Rows with the same history are adjacent. " : "") +
      "Point at a cell for why.",
  );
  const segments = (label, name, options) =>
    h(
      "label",
      {},
      label,
      h(
        "span",
        { class: "segments", role: "group", "aria-label": label },
        options.map(([value, text]) =>
          h(
            "button",
            {
              type: "button",
              "aria-pressed": String(view[name] === value),
              onclick: () => {
                state.write({ [name]: value });
                view[name] = value;
                maps();
              },
            },
            text,
          ),
        ),
      ),
    );
  const names = h("datalist", { id: "names" }, n <= 2000 ? stream.clients.map((c) => h("option", { value: c })) : []);
  const find = h("input", {
    list: "names",
    placeholder: "name",
    size: 12,
    "aria-label": "Find a client",
    onchange: (e) => {
      const c = stream.clients.indexOf(e.target.value.trim());
      if (c >= 0) view.choose(view.chosen[0], c);
    },
  });
  fill(
    "map-controls",
    found.cells.concept
      ? segments("Colour", "by", [
          ["model", "model"],
          ["concept", "true concept"],
        ])
      : null,
    segments("Order", "order", [
      ["given", "as given"],
      ["similar", "similar together"],
      ["worst", "worst first"],
    ]),
    h("label", {}, "Find client", find, names),
  );
  found.draw($("map"), view);
  const lineage = lineageChart(found, { width: $("lineage").getBoundingClientRect().width || 536, left: found.names });
  fill("lineage", lineage.svg);
  fill(
    "lineage-note",
    `${count(lineage.all, "model")} in all. A ring is a creation, with a thread from the parent; a curve into another row is ` +
      "a merge; thickness is the share of clients." +
      (lineage.folded ? " Models that were created and merged together share a row, +n." : "") +
      (lineage.hidden ? ` Not drawn: ${count(lineage.hidden, "model")} that fewest clients used.` : ""),
  );
  found.select(...view.chosen);
  fill("story", story(view));
}

function drifts() {
  const { run } = view,
    d = run.detection.noticed;
  fill("h-drifts", run.drifts ? "Drifts, and what was noticed" : "Alarms and switches");
  fill(
    "drifts-note",
    run.drifts
      ? "A drift is noticed by an alarm or by a switch to another model, in its own time step or up to " +
          `${view.data.within} later; every other alarm or switch is a false move. ` +
          "Dummies ignore the data: a useful detector does better than they do."
      : "The true concepts are unknown, so it is unknown which of these were right. " +
          "The scores and the reason of each are in its row.",
  );
  $("drifts-pair").hidden = !d;
  if (d) {
    const b = run.by_time,
      series = [
        ["noticed at once", b["at once"], "var(--good)"],
        ["noticed late", b.late, "var(--late)"],
        ["missed", b.missed, "var(--alarm)"],
        ["false moves", b.false.map((v) => -v), "var(--other)"],
      ];
    fill(
      "drifts-chart",
      barChart(
        series.map(([name, values, fill]) => ({ name, values, fill })),
        { width: 536, height: 230, label: "Drifts over time", xlabel: "time" },
      ),
      key(series.map(([name, , fill]) => [name + (name === "false moves" ? " (below the line)" : ""), fill])),
    );
    fill("detection", detectionTable(view));
  }
  fill("drifts-list", driftList(view));
}

function recovery() {
  const { stream, group, data } = view;
  const chosen = stream.groups.filter(
    (g) => g.around && (g === group || ["Oracle", "Oblivious"].includes(g.algorithm)),
  );
  fill("worst", worstTable(view));
  fill(
    "worst-note",
    (isSample(stream) ? "Of the clients that are shown. " : "") +
      `By mean ${score.title} over time. All lines have one scale, that of the map's colours.`,
  );
  $("recovery-part").hidden = !view.run.truth; // it is measured from true drifts
  if (!group.around) {
    fill("recovery-note", "No drift yet.");
    fill("recovery");
    return;
  }
  const [lost, oracle] = [group.numbers.lost[0], (group.numbers.lost_to_oracle || [null])[0]];
  fill(
    "recovery-note",
    `Mean ${score.title} around a drift, over all drifts and seeds. ` +
      "At 0 a model of the old concept meets data of the new one. " +
      (known(lost)
        ? `Each drift cost ${number(lost)} time steps of ${score.title} against the level before` +
          (known(oracle) && group.algorithm !== "Oracle" ? `, ${number(oracle)} against Oracle.` : ".")
        : ""),
  );
  const stroke = (g) => (g === group ? "var(--m0)" : g.algorithm === "Oracle" ? "var(--ink)" : "var(--soft)");
  fill(
    "recovery",
    lineChart(
      chosen.map((g) => ({
        name: g.algorithm,
        values: g.around,
        stroke: stroke(g),
        strong: true,
        dash: g === group ? null : g.algorithm === "Oracle" ? "5 4" : "2 4",
      })),
      {
        width: 536,
        height: 250,
        right: roomFor(
          chosen.map((g) => g.algorithm),
          180,
        ),
        label: `${heading()} around a drift`,
        xlabel: "time steps since the drift",
        show: (v) => (score.share ? `${Math.round(100 * v)} %` : number(v)),
        showX: (k) => k - data.before,
        xs: range(group.around.length),
        floor: 0,
        ceiling: score.share ? 1.004 : null,
        marks: data.before,
      },
    ),
  );
}

function resources() {
  const { run, group } = view,
    x = run.numbers;
  const lines = [
    { name: "in use", values: run.used, stroke: "var(--m0)", strong: true },
    { name: "in existence", values: run.exist, stroke: "var(--m5)", dash: "2 4", strong: true },
  ];
  if (run.concepts)
    lines.push({ name: "concepts", values: run.concepts, stroke: "var(--ink)", dash: "5 4", strong: true });
  fill(
    "models",
    lineChart(lines, {
      width: 536,
      height: 230,
      right: roomFor(
        lines.map((l) => l.name),
        180,
      ),
      label: "Models over time",
      xlabel: "time",
      floor: 0,
      whole: true,
    }),
  );
  fill(
    "models-note",
    known(x.spare)
      ? `On average ${number(Math.abs(x.spare))} ${x.spare < 0 ? "fewer" : "more"} in use than concepts alive.`
      : "Models that at least one client uses, and all that the server keeps.",
  );
  fill(
    "sent",
    barChart([{ name: "", values: run.sent, fill: "var(--m0)" }], {
      width: 536,
      height: 230,
      label: "Models sent",
      xlabel: "time",
      show: (v) => number(v, 1) + "×",
      line: 1,
    }),
  );
  const phases = [
    ["first", "first step"],
    ["drift", "steps with an alarm, a new model or a merge"],
    ["quiet", "quiet steps"],
  ].filter(([p]) => known(x[`sent ${p}`]));
  fill(
    "sent-note",
    "Relative to one model trained by all (dashed): " +
      phases.map(([p, text]) => `${text} ${number(x[`sent ${p}`])}×`).join(", ") +
      "." +
      (known(x["bytes training"])
        ? ` In all ${megabytes(x["bytes training"])} MB for training and ${megabytes(x["bytes scoring"])} MB for scoring.`
        : ""),
  );
  fill(
    "compare-note",
    "All algorithms that were run on these data, means over seeds. A column's head sorts by it, best first, and once more the other way." +
      (run.truth
        ? " Precision, recall and delay are of alarms and switches together. What is always bad has little to lose: " +
          "read lost per drift beside lost to Oracle."
        : ""),
  );
  fill("compare", comparison(view));
  fill("command", run.command);
  fill(
    "command-notes",
    run.notes.map((note) => h("li", {}, note)),
  );
  fill(
    "config",
    Object.entries(run.config).map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, v))),
  );
  fill(
    "foot",
    `Made ${view.data.made.replace("T", " ").slice(0, 16)} UTC by feddrift ${view.data.version} from records alone. ` +
      (group.summary ? `${group.algorithm}: ${group.summary}.` : ""),
  );
}
