/* Searches for words as code has them: --take-over, min_version, channel.json. The search's own syntax takes hyphens
 * for separators, or for "without". A plain word also finds the words that contain it. */
"use strict";
(() => {
  const QUERY = 2;
  const post = Worker.prototype.postMessage;
  const term = (word) => {
    const bare = word.replace(/^[-/]+|[-/.]+$/g, "");
    const start = bare.length > 3 && !bare.includes("*") ? "*" : "";
    // escaped twice: words are parsed before the query is
    return start + bare.replace(/[-+:^~]/g, "\\\\\\$&");
  };
  Worker.prototype.postMessage = function (message) {
    const isQuery = message.type === QUERY && !message.data.includes('"');
    post.call(this, isQuery ? { ...message, data: message.data.split(/\s+/).map(term).join(" ") } : message);
  };
})();
