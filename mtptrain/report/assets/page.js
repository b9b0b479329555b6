"use strict";
(() => {
  const mix = (a, b, t) => {
    const parts = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    const [p, q] = [parts(a), parts(b)];
    return `rgb(${p.map((x, i) => Math.round(x + (q[i] - x) * t)).join(",")})`;
  };

  // "--head" and "--line 0.5" in a figure, as page.css defines them under the scheme in force
  const resolved = (value, style) => {
    if (typeof value === "string" && value.startsWith("--")) {
      const [name, t] = value.split(" ");
      const read = (n) => style.getPropertyValue(n).trim();
      return t === undefined ? read(name) : mix(read(`${name}-lo`), read(`${name}-hi`), Number(t));
    }
    if (Array.isArray(value)) return value.map((v) => resolved(v, style));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, resolved(v, style)]));
    return value;
  };

  const charts = [...document.querySelectorAll(".chart")].map((box) => ({
    box,
    figure: JSON.parse(box.nextElementSibling.textContent),
  }));

  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    for (const { box, figure } of charts) {
      const { data, layout } = resolved(figure, style);
      layout.font.family = getComputedStyle(document.body).fontFamily;
      Plotly.react(box, data, layout, { responsive: true, displayModeBar: false, doubleClick: false });
    }
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  const copy = async (source) => {
    try {
      await navigator.clipboard.writeText(source.textContent);
      return true;
    } catch {
      getSelection().selectAllChildren(source);
      return document.execCommand("copy");
    }
  };
  for (const button of document.querySelectorAll("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const done = await copy(document.getElementById(button.dataset.copies));
      button.textContent = done ? "Copied" : "Press Ctrl+C";
      setTimeout(() => (button.textContent = "Copy"), 2000);
    });
  }
})();
