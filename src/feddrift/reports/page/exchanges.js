// What a server of real machines asked its clients, how long that took, and who sat out.
const ASKED = {
  hello: ["hello: new data, test", "var(--m5)"],
  evaluate: ["evaluate", "var(--m2)"],
  tournament: ["trial of starts", "var(--m4)"],
  train: ["train", "var(--m0)"],
};

function exchanges() {
  const { run, stream } = view,
    found = run.exchanges;
  $("exchanges").hidden = !found;
  if (!found) return;
  fill(
    "exchanges-note",
    "Seconds that the server waited for answers in each time step; where hello found nothing new, it counts once. " +
      `The last question was asked ${clock(found.last)} UTC.`,
  );
  const series = found.kinds
    .filter((kind) => sum(found.seconds[kind]))
    .map((kind) => ({ name: ASKED[kind][0], values: found.seconds[kind], fill: ASKED[kind][1] }));
  fill(
    "exchanges-chart",
    barChart(series, {
      width: 536,
      height: 230,
      label: "Seconds waited for answers",
      xlabel: "time",
      show: (v) => `${number(v, v < 10 ? 1 : 0)} s`,
    }),
    key(series.map(({ name, fill }) => [name, fill])),
  );
  const head = [["client", "text"], ["answered"], ["median, s"], ["slowest, s"], ["MB to"], ["MB from"]];
  fill(
    "exchanges-clients",
    table(
      head,
      found.clients.map((x, c) =>
        h(
          "tr",
          { title: x.trouble },
          cells(
            [
              nameOf(stream, c),
              `${x.answered} of ${x.asked}`,
              number(x.median, 1),
              number(x.slowest, 1),
              megabytes(x.to),
              megabytes(x.from),
            ],
            ["text"],
          ),
        ),
      ),
    ),
  );
  fill("exchanges-out", outList(found, stream));
}

function clock(at) {
  return at.slice(0, 19).replace("T", " ");
}

// The newest first.
function outList(found, stream, show = 8) {
  if (!found.out.length) return [h("p", { class: "note" }, "Nobody: every question was answered.")];
  const head = [
    ["when, UTC", "text"],
    ["time", "text"],
    ["client", "text"],
    ["asked", "text"],
    ["why", "text"],
  ];
  const kinds = ["text tight", "text tight", "text tight", "text tight", "text wide"];
  const rows = found.out
    .slice(-show)
    .reverse()
    .map(([at, t, c, asked, round, why]) =>
      h(
        "tr",
        {},
        cells([clock(at), t + 1, nameOf(stream, c), asked + (known(round) ? `, round ${round + 1}` : ""), why], kinds),
      ),
    );
  const more = () => fill("exchanges-out", outList(found, stream, show * 4));
  return [
    table(head, rows),
    found.out.length > show
      ? h(
          "div",
          { class: "more" },
          h("button", { type: "button", onclick: more }, "Show more"),
          `${show} of ${found.n_out}`,
        )
      : null,
  ];
}
