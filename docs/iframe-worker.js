// Search in pages that were opened from a folder. Browsers start no workers for these, so the worker's script runs in a
// hidden frame, and messages go to and fro as events. (Material's offline plugin knows such a script by this name.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #loaded;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inside = this.#frame.contentDocument;
      inside.open(); // or a browser may put another empty document in its place
      inside.write("<body></body>");
      inside.close();
      this.#frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.createElement("script");
      script.src = new URL(url, document.baseURI).href;
      this.#loaded = new Promise((done) => script.addEventListener("load", done));
      inside.body.append(script);
    }

    postMessage(data) {
      const inside = this.#frame.contentWindow;
      this.#loaded.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
