"use strict";
// Draws the figures of figures.py with plotly.js on the chosen clock, and keeps one range for all of them.
(async () => {
  const unpack = async (id) => {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const library = document.createElement("script");
  library.textContent = await unpack("library"); // its hash is in the page's policy
  document.head.append(library);
  const { places, marks, figures } = JSON.parse(await unpack("data"));
  const root = document.documentElement, all = (selector) => [...document.querySelectorAll(selector)];
  const plots = all(".plot"), kept = places[0], whole = places.filter((place) => place.whole);

  const BUTTONS = ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "autoScale2d"]; // none that sends anything

  // ---------------------------------------------------------------- clocks
  let clock = "step", range; // the range: in steps, tokens, or milliseconds since 1970
  const column = (place) => {
    if (clock === "date") return place.written.map((value) => value && value * 1000);
    return place[clock];
  };
  const extent = () => {
    const known = whole.flatMap(column).filter((value) => value !== null);
    const [low, high] = known.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
    if (!(high >= low)) return [0, 1];
    const from = clock !== "date" && low < high / 10 ? 0 : low;
    return high > from ? [from, high] : [from - 0.5, from + 0.5];
  };
  const number = (value) => (typeof value === "string" ? Date.parse(`${value.replace(" ", "T")}Z`) : value); // dates of plotly
  const nearest = (value, values) => {
    const at = values.findIndex((each) => each >= value);
    return at < 0 ? values.length - 1 : at;
  };

  // ---------------------------------------------------------------- drawing
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const paint = (value) => {
    if (typeof value === "string") return value.startsWith("--") ? css(value) : value;
    if (!value || typeof value !== "object" || Array.isArray(value)) return value;
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, paint(each)]));
  };
  const traced = ({ place, rows, low, high, ...trace }) => {
    let x = column(places[place]);
    if (rows) x = rows.map((row) => (row === null ? null : x[row]));
    const found = { type: "scatter", showlegend: false, x, ...paint(trace) };
    if (!low) return [found];
    found.customdata = low.map((value, at) => [value, high[at]]);
    // The shade between the extremes: a polygon for every part without a break.
    const shade = { x: [], y: [] };
    for (let from = 0, to = 0; to <= x.length; to += 1)
      if (to === x.length || low[to] === null) {
        for (let at = from; at < to; at += 1) { shade.x.push(x[at]); shade.y.push(high[at]); }
        for (let at = to - 1; at >= from; at -= 1) { shade.x.push(x[at]); shade.y.push(low[at]); }
        shade.x.push(null); shade.y.push(null);
        from = to + 1;
      }
    const line = { width: 0.5, color: found.line.color };
    return [{ ...found, ...shade, line, showlegend: false, fill: "toself", fillcolor: line.color, opacity: 0.3, hoverinfo: "skip", hovertemplate: undefined, customdata: undefined }, found];
  };
  const draw = (at) => {
    const figure = figures[at], grid = css("--grid"), line = { color: css("--muted"), gridcolor: grid, zerolinecolor: grid, linecolor: grid };
    const x = { type: clock === "date" ? "date" : "linear", exponentformat: clock === "step" ? "none" : "B", separatethousands: true };
    const layout = {
      xaxis: { ...line, ...x, range: [...range], uirevision: clock }, yaxis: { ...line, ...figure.axis },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      height: figure.height, uirevision: "kept", // what a person chose stays
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 78, r: 26, t: 24, b: clock === "date" ? 38 : 24, autoexpand: false },
      font: { family: "system-ui, sans-serif", size: 11, color: css("--ink") }, legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" }, modebar: { bgcolor: "rgba(0,0,0,0)", color: line.color, activecolor: css("--c0") },
      hovermode: figure.unified ? "x unified" : "closest", hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") }, align: "left", namelength: -1 },
    };
    const traces = [...(figure.unified ? marks : []), ...figure.traces].flatMap(traced);
    return Plotly.react(plots[at], traces, layout, { displaylogo: false, responsive: true, doubleClick: false, showTips: false, modeBarButtons: [BUTTONS], ...(root.clientWidth < 700 && { displayModeBar: false }) });
  };
  const drawAll = () => Promise.all(figures.map((_, at) => draw(at)));

  // ---------------------------------------------------------------- one range, one place
  const zoom = (low, high) => {
    range = [low, high];
    return Promise.all(plots.map((plot) => plot.data && Plotly.relayout(plot, { "xaxis.range": [low, high] })));
  };
  const choose = (name) => {
    clock = name;
    range = extent();
    for (const button of all("#clocks button")) button.setAttribute("aria-pressed", String(button.value === clock));
    return drawAll();
  };
  const where = document.getElementById("where"), count = (value) => value.toLocaleString("en-US", { notation: "compact", maximumSignificantDigits: 4 });
  const tell = (x, points) => {
    if (!kept.step.length) return;
    const at = nearest(x, column(kept)), events = points.flatMap(({ data, pointNumber }) => data.told?.[pointNumber] ?? []);
    const place = `step ${kept.step[at].toLocaleString("en-US")} · ${count(kept.trained[at])} tokens · ${new Date(kept.written[at] * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`;
    where.replaceChildren(...[place, ...new Set(events)].map((text) => Object.assign(document.createElement("p"), { textContent: text })));
  };

  // ---------------------------------------------------------------- the page
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const dress = () => { root.dataset.theme = dark.matches ? "dark" : "light"; };
  dark.addEventListener("change", () => { dress(); drawAll(); });
  for (const button of all("#clocks button")) button.addEventListener("click", () => choose(button.value));
  const form = document.getElementById("filter"), rows = all("#events tbody tr");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    const kind = form.kind.value, text = form.text.value.toLowerCase();
    const fits = { marked: (row) => row.dataset.marked === "1", worse: (row) => row.dataset.severity > 0, all: () => true }[kind] ?? ((row) => row.dataset.group === kind);
    for (const row of rows) row.hidden = !(fits(row) && row.textContent.toLowerCase().includes(text));
  });
  // A step in the table zooms to a twentieth of the run around it.
  for (const row of rows) row.querySelector("button").addEventListener("click", () => {
    const [place, at] = row.dataset.place.split(" "), x = column(places[place])[at], [first, last] = extent();
    if (x === null) return;
    zoom(Math.max(first, x - (last - first) / 40), Math.min(last, x + (last - first) / 40));
    document.getElementById("panels").scrollIntoView();
  });
  dress();
  range = extent();
  for (const at of figures.keys()) {
    await draw(at);
    await new Promise((go) => setTimeout(go)); // so that the first can be seen
  }
  plots.forEach((plot, at) => {
    const others = plots.filter((other, number) => other !== plot && figures[at].unified && figures[number].unified);
    plot.on("plotly_relayout", (change) => {
      const [low, high] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (change["xaxis.autorange"]) zoom(...extent());
      else if (low !== undefined) zoom(number(low), number(high));
    });
    plot.on("plotly_doubleclick", () => Plotly.relayout(plot, { "yaxis.autorange": true }).then(() => zoom(...extent())));
    plot.on("plotly_hover", ({ event, xvals, points }) => {
      if (!event?.target) return; // from below
      const x = number(xvals?.[0] ?? points[0].x);
      tell(x, points);
      for (const other of others) {
        const { top, bottom } = other.getBoundingClientRect();
        if (bottom > 0 && top < window.innerHeight) Plotly.Fx.hover(other, { xval: x });
      }
    });
    plot.on("plotly_unhover", () => { where.replaceChildren(); others.forEach((other) => Plotly.Fx.unhover(other)); });
  });
  window.ready = true;
})();
