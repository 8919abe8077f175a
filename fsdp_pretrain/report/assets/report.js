"use strict";
// The toolbar, themes, printing, and the start of the page.
(() => {
  const { create, format } = Report, root = document.documentElement, { runs } = Report.data;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const themeButton = document.getElementById("theme");
  const paint = (theme) => {
    root.dataset.theme = theme;
    themeButton.textContent = theme === "dark" ? "light" : "dark";
    document.querySelectorAll(".run .swatch").forEach((swatch, number) => { swatch.style.background = `var(--c${number % 8})`; });
  };
  const choose = (theme) => { paint(theme); Report.build(); };
  themeButton.addEventListener("click", () => choose(root.dataset.theme === "dark" ? "light" : "dark"));
  dark.addEventListener("change", () => choose(dark.matches ? "dark" : "light"));

  const clocks = document.getElementById("clocks");
  const press = () => [...clocks.children].forEach((button) => button.setAttribute("aria-pressed", String(button.value === Report.clock)));
  for (const [name, { label }] of Object.entries(Report.clocks)) {
    const button = create("button", { type: "button", value: name }, label);
    button.addEventListener("click", () => {
      Report.choose(name);
      press();
      Report.build();
    });
    clocks.append(button);
  }

  const scale = (factor, shift) => () => {
    const [low, high] = Report.range, middle = (low + high) / 2 + (high - low) * shift, half = ((high - low) / 2) * factor;
    const [first, last] = Report.extent(), width = Math.min(half * 2, last - first);
    const from = Math.min(Math.max(first, middle - half), last - width);
    Report.zoom(from, from + width);
  };
  const zoom = document.getElementById("zoom");
  for (const [sign, title, act] of [["◀", "to the left", scale(1, -0.5)], ["−", "zoom out", scale(2, 0)], ["+", "zoom in", scale(0.5, 0)], ["▶", "to the right", scale(1, 0.5)], ["all", "the whole run", () => Report.zoom(...Report.extent())]]) {
    const button = create("button", { type: "button", title, ariaLabel: title }, sign);
    button.addEventListener("click", act);
    zoom.append(button);
  }

  // The position of the cursor on every clock.
  const where = document.getElementById("where");
  const locate = (value) => {
    const run = runs[0], x = Report.onClock(run, run.kept.clocks);
    let [low, high] = [0, x.length - 1];
    if (high < 0) return "";
    while (low < high) { const middle = (low + high) >> 1; if (x[middle] < value) low = middle + 1; else high = middle; }
    const at = (name) => run.kept.clocks[name][low];
    return `step ${format.whole(at("step"))} · ${format.count(at("consumed"))} samples · ${format.count(at("trained"))} tokens · ${format.date(at("written"))} UTC`;
  };
  document.addEventListener("mousemove", (event) => {
    const chart = Report.charts.find((each) => each.over === event.target || each.over.contains(event.target));
    where.textContent = chart ? locate(chart.posToVal(event.clientX - chart.over.getBoundingClientRect().left, "x")) : "";
  });

  // Charts keep their host's width; paper is light and as wide as it is.
  let width = window.innerWidth;
  const fit = (paper) => {
    for (const chart of Report.charts) {
      const to = paper ? (chart.root.closest(".grid") ? 340 : 700) : chart.root.parentElement.clientWidth;
      chart.setSize({ width: to, height: chart.height });
    }
  };
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    requestAnimationFrame(() => fit(false));
  });
  let before = null;
  window.addEventListener("beforeprint", () => { before = root.dataset.theme; paint("light"); Report.build(); fit(true); });
  window.addEventListener("afterprint", () => { if (before) { choose(before); before = null; } });

  document.body.classList.toggle("several", runs.length > 1);
  paint(dark.matches ? "dark" : "light");
  press();
  Report.build();
  Report.verdicts();
  Report.accounts();
  Report.filters();
  Report.list();
})();
