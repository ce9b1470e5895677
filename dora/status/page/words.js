// Activities (dora/observe/activities.py) in the words of the page.

export const RANK = {
  start: "starting", packing: "packing", forward_backward: "forward and backward pass", optimizer: "optimizer",
  copying: "copying weights", saving: "writing a checkpoint", unreported: "not reported",
};

export const INSTANCE = {
  "decoding": "generating", "prefill": "reading prompts", "push:wait": "waiting for new weights", "push:drain": "pausing for new weights",
  "push:load": "loading new weights", "push:verify": "checking new weights", "down": "down",
};

/** What the trainer waits for. */
export const WAITING = {
  start: "its ranks", evaluation: "the evaluation of version 0", generation: "answers", tail: "the last answers",
  grading: "graders", publishing: "the new version to be stored", push: "the new version to reach a server",
  admission: "a new group", delivery: "a micro-batch on its way", slowest_rank: "the slowest rank", end: "the end of the run",
};

/** Why a server has nothing to do. */
export const EMPTY = {
  drained: "drained by a user", new: "waiting for its first version", quarantined: "its last push failed", old_version: "holds an older version",
  calls: "all its answers are calling their environment", admitting: "a group is about to be admitted", ended: "the run has ended",
  no_version: "no version is published yet", no_prompt: "no prompt is available", window: "the limit of untrained groups is reached",
  baseline: "version 0 is evaluated first", block: "the batch is admitted and not yet complete", hosts: "the environment's hosts are full",
  rule_f: "one more group might get too stale", no_instance: "no server takes requests for the newest version",
  yields: "makes room for an older version", no_room: "all servers of the newest version are full",
  share: "has its share of the requests until other servers have loaded this version", pushes: "a batch starts once all pushes are done",
};

/** Words for an activity of either kind. */
export function words(activity) {
  const [what, cause] = activity.split(":");
  if (what === "waiting") return `waiting for ${WAITING[cause] ?? cause}`;
  if (what === "empty") return `idle: ${EMPTY[cause] ?? cause}`;
  return INSTANCE[activity] ?? RANK[activity] ?? activity;
}
