// The two maps with a column for each time step and a row for each client: the model in use, and its accuracy.
const ROOM = 620; // maximum height of a map in pixels
const NAME = 25; // maximum letters of a client's name beside its row

// The width of a name in the font of the map, in pixels: WN is twice as wide as il.
function widthOf(name) {
  const g = document.createElement("canvas").getContext("2d");
  g.font = mapFont();
  return Math.ceil(g.measureText(name).width);
}

const mapFont = () => `12px ${getComputedStyle(document.body).fontFamily}`;

class Maps {
  constructor(stream, run, choose) {
    Object.assign(this, { stream, run, choose, cells: run.cells, n: stream.clients.length, T: run.steps });
    const flags = (name) => new Set(this.cells[name]);
    this.alarms = flags("alarms");
    this.switches = flags("switches");
    this.changes = flags("changes");
    this.nothing = flags("nothing");
    this.absent = flags("absent");
    this.shade = shades(run);
    const seen = this.cells.accuracy.filter((v) => v >= 0).sort((a, b) => a - b);
    const bad = (share) => seen[Math.floor((seen.length - 1) * share)] ?? 0; // the worst 1 % have one colour
    this.high = !seen.length ? 1000 : score.higher_is_better ? seen[seen.length - 1] : bad(0.99);
    this.low = score.higher_is_better ? Math.max(0, Math.min(bad(0.01), this.high - 50)) : (seen[0] ?? 0);
  }
  at(t, c) {
    return t * this.n + c;
  }

  // Returns the clients in their order from top to bottom.
  ordered(order) {
    const c = range(this.n),
      { model, accuracy } = this.cells;
    if (order === "similar") {
      const root = (i) => this.cells.roots[model[i]] ?? model[i];
      const compare = (a, b) => {
        for (let t = 0; t < this.T; t++) {
          const gap = root(this.at(t, a)) - root(this.at(t, b));
          if (gap) return gap;
        }
        return a - b;
      };
      return c.sort(compare);
    }
    if (order === "worst") {
      const mean = c.map((k) => {
        const values = range(this.T)
          .map((t) => accuracy[this.at(t, k)])
          .filter((v) => v >= 0);
        return values.length ? (score.higher_is_better ? 1 : -1) * (sum(values) / values.length) : Infinity;
      });
      return c.sort((a, b) => (mean[a] === mean[b] ? a - b : mean[a] - mean[b]));
    }
    return c;
  }

  draw(into, { by, order }) {
    this.rows = this.ordered(order);
    this.place = new Map(this.rows.map((c, i) => [c, i]));
    this.tall = Math.min(26, Math.max(ROOM / this.n, 0.05));
    this.names =
      this.tall >= 11
        ? Math.min(190, 14 + this.stream.clients.reduce((most, x) => Math.max(most, widthOf(shorten(x, NAME))), 0))
        : 46;
    const scale = ramp(this.low, this.high),
      heat = (v) => scale(score.higher_is_better ? v : this.low + this.high - v),
      { model, accuracy, concept } = this.cells;
    const byConcept = by === "concept" && concept,
      blank = rgb(colour("wash"));
    const shade = (i) => (byConcept ? this.shade.concept(concept[i]) : this.shade.model(model[i]));
    const pale = (full) => full.map((part, k) => Math.round(0.35 * part + 0.65 * blank[k])); // no new data
    const of = (i) => (this.absent.has(i) ? blank : this.nothing.has(i) ? pale(shade(i)) : shade(i));
    const text = (i) => (this.absent.has(i) ? "" : byConcept ? letter(concept[i]) : String(model[i]));
    this.panels = [
      this.panel("Model in use", of, text, true),
      this.panel(
        `${heading()} on the next time step`,
        (i) => (accuracy[i] < 0 ? blank : heat(accuracy[i])),
        (i) => (accuracy[i] < 0 ? "" : score.share ? Math.round(accuracy[i] / 10) : (accuracy[i] / 1000).toFixed(1)),
        false,
      ),
    ];
    into.replaceChildren(...this.panels.map((p) => p.box));
    for (const p of this.panels) this.paint(p);
    this.legends(by);
  }

  panel(title, fillOf, textOf, marks) {
    const canvas = h("canvas", { "aria-hidden": "true" });
    const row = h("div", { class: "cursor row", hidden: true }),
      cursor = h("div", { class: "cursor", hidden: true });
    const map = h(
      "div",
      {
        class: "map",
        tabindex: marks ? 0 : null,
        role: marks ? "application" : null,
        "aria-label": marks
          ? `${title}: ${count(this.n, "client")} by ${count(this.T, "time step")}. ` +
            "Arrow keys move from cell to cell; the text below describes the cell."
          : null,
        onkeydown: (e) => this.key(e),
      },
      canvas,
      row,
      cursor,
    );
    map.addEventListener("mousemove", (e) => this.hover(e, canvas));
    map.addEventListener("mouseleave", () => {
      tip();
      this.point(this.chosen);
    });
    map.addEventListener("click", (e) => {
      const hit = this.hit(e, canvas);
      if (hit) this.choose(...hit);
    });
    return {
      box: h("div", {}, h("h3", {}, title), map, h("div", { class: "legend-of" })),
      map,
      canvas,
      row,
      cursor,
      fillOf,
      textOf,
      marks,
    };
  }

  paint(p) {
    const width = Math.floor(p.box.getBoundingClientRect().width || 540),
      top = 4,
      bottom = 24;
    const wide = (width - this.names) / this.T,
      height = top + this.tall * this.n + bottom,
      scale = devicePixelRatio || 1;
    Object.assign(p, { wide, top });
    p.canvas.width = width * scale;
    p.canvas.height = height * scale;
    p.canvas.style.width = width + "px";
    p.canvas.style.height = height + "px";
    const g = p.canvas.getContext("2d");
    g.scale(scale, scale);
    if (this.tall >= 7) this.paintCells(p, g);
    else this.paintDense(p, g);
    g.fillStyle = colour("soft");
    g.font = mapFont();
    g.textAlign = "center";
    g.textBaseline = "top";
    for (const t of times(this.T, width - this.names, 30)) {
      const middle = this.names + wide * (t + 0.5),
        half = g.measureText(timeMark(t)).width / 2;
      g.fillText(timeMark(t), Math.min(middle, width - half), top + this.tall * this.n + 8);
    }
    g.textAlign = "right";
    g.textBaseline = "middle";
    if (this.tall >= 11)
      this.rows.forEach((c, i) =>
        g.fillText(shorten(this.stream.clients[c], innerWidth < 700 ? 13 : NAME), this.names - 10, top + this.tall * (i + 0.5)),
      );
    else for (const k of ticks(0, this.n, 8)) g.fillText(k || "", this.names - 10, top + this.tall * k);
  }

  paintCells(p, g) {
    const gap = this.tall > 14 ? 2 : 1,
      font = Math.min(12, this.tall * 0.55);
    const labels = p.wide > 22 && this.tall >= 14;
    g.textAlign = "center";
    g.textBaseline = "middle";
    for (let t = 0; t < this.T; t++) {
      this.rows.forEach((c, i) => {
        const k = this.at(t, c),
          x = this.names + p.wide * t,
          y = p.top + this.tall * i,
          shade = p.fillOf(k);
        const w = Math.max(1, p.wide - (p.wide > 6 ? gap : 0)),
          tall = this.tall - gap;
        g.fillStyle = `rgb(${shade})`;
        g.beginPath();
        g.roundRect(x, y, w, tall, Math.min(3, w / 4));
        g.fill();
        if (labels) {
          g.fillStyle = light(shade) ? "rgba(20,22,25,0.86)" : "rgba(255,255,255,0.94)";
          g.font = `500 ${font}px ${getComputedStyle(document.body).fontFamily}`;
          g.fillText(p.textOf(k), x + w / 2, y + tall / 2 + 0.5);
        }
        if (!p.marks) return;
        g.fillStyle = colour("ink");
        if (this.changes.has(k)) g.fillRect(x, y, Math.min(3, w / 3), tall);
        if (this.alarms.has(k)) {
          const size = Math.min(9, tall * 0.5, w * 0.6);
          for (const [fill, edge] of [
            ["paper", 2.5],
            ["alarm", 0],
          ]) {
            // a rim that separates it from any colour of the cell
            g.fillStyle = colour(fill);
            g.beginPath();
            g.moveTo(x + w - size - edge, y);
            g.lineTo(x + w, y);
            g.lineTo(x + w, y + size + edge);
            g.fill();
          }
        }
      });
    }
  }

  // With too many clients for cells, a row is one pixel high; the edges of its cells mark changes and alarms.
  paintDense(p, g) {
    const per = Math.max(4, Math.round(p.wide * (devicePixelRatio || 1))),
      edge = Math.max(1, Math.round(per / 14));
    const image = new ImageData(this.T * per, Math.min(this.n, 4000)),
      pixels = new Uint32Array(image.data.buffer);
    const word = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0,
      ink = word(rgb(colour("ink"))),
      red = word(rgb(colour("alarm")));
    for (let i = 0; i < image.height; i++) {
      const c = this.rows[Math.floor(((i + 0.5) * this.n) / image.height)]; // of more than 4000 clients, a sample
      for (let t = 0; t < this.T; t++) {
        const k = this.at(t, c),
          from = i * image.width + t * per;
        pixels.fill(word(p.fillOf(k)), from, from + per);
        if (p.marks && this.changes.has(k)) pixels.fill(ink, from, from + edge);
        if (p.marks && this.alarms.has(k)) pixels.fill(red, from + per - 2 * edge, from + per);
      }
    }
    const small = h("canvas", { width: image.width, height: image.height });
    small.getContext("2d").putImageData(image, 0, 0);
    g.imageSmoothingEnabled = this.tall < 1;
    g.imageSmoothingQuality = "high";
    g.drawImage(small, this.names, p.top, p.wide * this.T, this.tall * this.n);
  }

  legends(by) {
    const { concept, concepts } = this.cells,
      [left, right] = this.panels.map((p) => p.box.lastChild);
    const what =
      by === "concept" && concept
        ? Object.entries(concepts).map(([k, name]) => [`concept ${name}`, `rgb(${this.shade.concept(+k)})`])
        : this.shade.named.map(([name, fill]) => [name, fill]);
    left.replaceChildren(
      h(
        "div",
        { class: "key" },
        what.map(([text, fill]) => h("span", {}, h("i", { class: "swatch", style: `background:${fill}` }), text)),
        this.changes.size
          ? h(
              "span",
              {},
              h("i", { class: "swatch", style: "width:3px;border-radius:0;background:var(--ink)" }),
              "concept changed",
            )
          : null,
        this.absent.size
          ? h("span", {}, h("i", { class: "swatch", style: "background:var(--wash)" }), "not joined yet")
          : null,
        this.nothing.size > this.absent.size ? h("span", {}, "pale: no new data") : null,
        this.alarms.size
          ? h(
              "span",
              {},
              h("i", { class: "swatch", style: "background:var(--alarm);clip-path:polygon(0 0,100% 0,100% 100%)" }),
              "alarm",
            )
          : null,
      ),
    );
    const heat = ramp(0, 5),
      stops = range(6)
        .map((k) => `rgb(${heat(k)})`)
        .join(",");
    right.replaceChildren(
      h(
        "div",
        { class: "key" },
        h(
          "span",
          {},
          this.ends()[0],
          h("i", { class: "ramp", style: `background:linear-gradient(90deg,${stops})` }),
          this.ends()[1],
        ),
        this.cells.accuracy.includes(-2) ? h("span", {}, "last column: not tested yet") : null,
      ),
    );
  }

  // The labels of both ends of the colour scale.
  ends() {
    const [low, high] = [this.low, this.high].map((v) => level(v / 1000, 0) + unit());
    return score.higher_is_better ? [low + (this.low > 0 ? " or less" : ""), high] : [`${high} or more`, low];
  }

  hit(event, canvas) {
    const box = canvas.getBoundingClientRect(),
      p = this.panels[0];
    const t = Math.floor((event.clientX - box.left - this.names) / p.wide),
      i = Math.floor((event.clientY - box.top - p.top) / this.tall);
    return t >= 0 && t < this.T && i >= 0 && i < this.n ? [t, this.rows[i]] : null;
  }

  hover(event, canvas) {
    const hit = this.hit(event, canvas);
    if (!hit) {
      tip();
      return;
    }
    this.point(hit);
    tip(event, ...this.buildTooltip(...hit));
  }

  // The content of the tooltip of a cell.
  buildTooltip(t, c) {
    const k = this.at(t, c),
      { model, accuracy, concept, loss } = this.cells;
    const pairs = [
      ["model", model[k]],
      [`${score.title}, next step`, testOf(accuracy[k])],
    ];
    if (this.absent.has(k)) pairs.splice(0, 1, ["", "had not joined yet"]);
    if (loss && known(loss[k])) pairs.push([`${this.run.metric} before training`, loss[k].toFixed(3)]);
    if (concept) pairs.push(["concept", letter(concept[k]) + (this.changes.has(k) ? ", changed" : "")]);
    const why = reasons(this, t, c);
    return [
      h("b", {}, `${nameOf(this.stream, c)}, ${timeOf(this.run, t)}`),
      h(
        "div",
        { class: "pairs" },
        pairs.flatMap(([a, b]) => [h("span", {}, a), h("span", {}, String(b))]),
      ),
      ...why.map((text) => h("p", {}, text)),
    ];
  }

  point(hit) {
    for (const p of this.panels) {
      p.row.hidden = p.cursor.hidden = !hit;
      if (!hit) continue;
      const [t, c] = hit,
        y = p.top + this.tall * this.place.get(c),
        tall = Math.max(this.tall, 3);
      p.row.style.cssText = `left:${this.names}px;width:${p.wide * this.T}px;top:${y - 1}px;height:${tall + 1}px`;
      const x = this.names + p.wide * t;
      p.cursor.style.cssText = `left:${x - 2}px;width:${p.wide + 2}px;top:${y - 2}px;height:${tall + 2}px`;
    }
  }

  select(t, c) {
    this.chosen = [t, c];
    this.point(this.chosen);
  }

  key(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [t, c] = this.chosen || [0, this.rows[0]],
      i = this.place.get(c) + step[1];
    this.choose(Math.min(this.T - 1, Math.max(0, t + step[0])), this.rows[Math.min(this.n - 1, Math.max(0, i))]);
  }
}
