// Asks for news once a second while somebody looks at the page. What is behind this page's time is passed over.

const EVERY_MS = 1000;
const LIMIT_MS = 5000;

export class Feed {
  constructor(onNews, onTrouble) {
    this.onNews = onNews;
    this.onTrouble = onTrouble;
    this.after = 0;
    this.served = "";
    this.timer = undefined;
    this.isAsking = false;
    document.addEventListener("visibilitychange", () => this.wake());
  }

  wake() {
    clearTimeout(this.timer);
    if (!document.hidden && !this.isAsking) this.ask();
  }

  async ask() {
    this.isAsking = true;
    const began = performance.now();
    try {
      const answer = await fetch(`feed?after=${this.after}&served=${this.served}`, { cache: "no-store", signal: AbortSignal.timeout(LIMIT_MS) });
      if (!answer.ok) throw new Error(`the page's server says ${answer.status}`);
      const news = await answer.json();
      news.isServedAnew = this.served !== "" && news.served !== this.served;
      if (news.isServedAnew) this.after = 0;
      this.served = news.served;
      if (news.frames.length) this.after = news.frames.at(-1).seq;
      this.onNews(news);
    } catch (error) {
      this.onTrouble(error.name === "TimeoutError" ? "no answer for 5 s" : "the page is not served any more, or the tunnel to it is closed");
    } finally {
      this.isAsking = false;
      if (!document.hidden) this.timer = setTimeout(() => this.ask(), Math.max(100, EVERY_MS - (performance.now() - began)));
    }
  }
}

// Another question than what is new: begun, then asked after until it is answered. Yields its answer; throws what went wrong.
export async function asked(path, fields, onCommand) {
  const headers = { "X-Tenuto-Page": "1" };
  const query = new URLSearchParams(fields);
  const begun = await fetch(`${path}?${query}`, { headers, cache: "no-store" });
  if (!begun.ok) throw new Error((await begun.text()).trim());
  const { number, command } = await begun.json();
  onCommand(command.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`)).join(" "));
  for (let tries = 0; tries < 600; tries += 1) {
    await new Promise((resolve) => setTimeout(resolve, 400));
    const answer = await fetch(`answer?number=${number}`, { headers, cache: "no-store" });
    if (!answer.ok) throw new Error((await answer.text()).trim());
    const told = await answer.json();
    if (told.error) throw new Error(told.error);
    if (told.answer) return { ...told.answer, remarks: told.remarks };
  }
  throw new Error("no answer for minutes");
}
