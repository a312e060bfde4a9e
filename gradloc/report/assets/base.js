// The page's script, in parts that are put together in this order: base, chart, tokens, events, keys.
// No requests, and uPlot (MIT) is the one library; text enters the page through textContent or from the page's own escaped HTML.
const data = JSON.parse(document.getElementById("payload").textContent);
const all = (root, query) => Array.from(root.querySelectorAll(query));
const make = (name, properties, ...children) => {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
};
const plain = (value) => (typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 4 }) : value);
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

async function copy(button) {
  const issue = data.events[button.dataset.issue]?.issue;
  const withText = issue && button.closest(".report").querySelector(".with-text").checked;
  const text = issue ? issue[0] + (withText ? issue[1] : "") : button.dataset.copy;
  const label = (button.dataset.label ??= button.textContent);
  let isDone = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // No clipboard for pages from disk in some browsers: the old way, through a selection.
    const field = make("textarea", { value: text, className: "visually-hidden" });
    document.body.append(field);
    field.select();
    isDone = document.execCommand("copy");
    field.remove();
    button.focus();
  }
  button.textContent = isDone ? "Copied" : "Select it";
  setTimeout(() => { button.textContent = label; }, 1600);
}
