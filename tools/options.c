/* The tables of the commands and their options. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <string.h>

#include "tools/cli.h"

#define AT(field) offsetof(kvf__cli, field)
#define N(array) (sizeof(array) / sizeof(array)[0])
#define U32_LIMIT 4294967295.0

/* ---- Groups ------------------------------------------------------------------------------------- */

static const kvf__arg model_args[] = {
    {"model", "FILE", "GGUF file of a Llama-family model", "~/.cache/kvfold/SmolLM2-135M-Instruct.Q4_1.gguf",
     KVF__ARG_TEXT, AT(model), 0, 0, NULL},
    {"threads", "N", "threads", "the CPUs there are", KVF__ARG_COUNT, AT(threads), 1, 1024, NULL},
};
static const kvf__arg_group model_group = {"Model", model_args, N(model_args), NULL};

static const kvf__arg run_args[] = {
    {"input", "FILE",
     "requests, one JSON object a line, in kvfold's form or that of OpenAI batch files (see below), plain or "
     "compressed (gzip, zstd); - is standard input",
     NULL, KVF__ARG_TEXT, AT(input), 0, 0, NULL},
    {"prompt", "TEXT", "one request instead of --input: a user's message; its answer is printed while it is generated",
     NULL, KVF__ARG_TEXT, AT(prompt), 0, 0, NULL},
    {"output", "FILE",
     "results, one JSON object a line, written as each request ends; - is standard output. A file that has "
     "answers is left alone without --resume or --force; all other output files are overwritten",
     "-; with --prompt: the text alone", KVF__ARG_TEXT, AT(output), 0, 0, NULL},
    {"system", "TEXT", "system message for --prompt, and for `messages` that have none", NULL, KVF__ARG_TEXT,
     AT(system), 0, 0, NULL},
    {"chat-template", "NAME",
     "how messages become text: auto (by the model's file, but without a default system message; if the file "
     "has no template, name one), chatml, llama2, llama3, mistral, or none (contents joined, without roles)",
     "auto", KVF__ARG_CHOICE, AT(chat_template), 0, 0, "auto|chatml|llama2|llama3|mistral|none"},
    {"raw", NULL, "--prompt is text to continue, not a message", NULL, KVF__ARG_FLAG, AT(raw), 0, 0, NULL},
    {"special", NULL,
     "control tokens written out (<|im_end|>) in --prompt with --raw, or in a line's `prompt`, count as "
     "control tokens",
     NULL, KVF__ARG_FLAG, AT(special), 0, 0, NULL},
};
static const kvf__arg batch_args[] = {
    {"resume", NULL,
     "continue the --output FILE of an earlier run: skip what is done, repeat errors and an incomplete last "
     "line; refused if the model or an option that can change an answer differs from the file's header, or if "
     "a line of the input has changed since it was answered",
     NULL, KVF__ARG_FLAG, AT(resume), 0, 0, NULL},
    {"force", NULL,
     "with --resume: continue even with another model, other options or changed lines, and keep the answers as "
     "they are; without --resume: overwrite the answers in --output",
     NULL, KVF__ARG_FLAG, AT(force), 0, 0, NULL},
    {"sync", "WHEN",
     "when results are synced to disk (fdatasync), in case the machine fails: second (at most once a second, "
     "and at the end), line (after each) or never; the end of the process, even kill -9, loses no finished "
     "line",
     "second", KVF__ARG_CHOICE, AT(sync), 0, 0, "second|line|never"},
    {"served-model-name", "NAME",
     "another name for the model in bodies of the OpenAI form, beside its own and its file's; may be given "
     "several times",
     NULL, KVF__ARG_LIST, AT(served_names), 0, 0, NULL},
    {"any-model", NULL, "accept any model name in bodies of the OpenAI form", NULL, KVF__ARG_FLAG, AT(any_model), 0, 0,
     NULL},
};
static const kvf__arg_group batch_group = {"Batch jobs", batch_args, N(batch_args), NULL};

static const kvf__arg_group run_group = {"Requests and results", run_args, N(run_args), NULL};

static const kvf__arg sampling_args[] = {
    {"max-tokens", "N", "tokens to generate for a request, at most",
     "256; OpenAI form: the context for a chat, 16 for a completion", KVF__ARG_COUNT, AT(max_tokens), 1, U32_LIMIT,
     NULL},
    {"temperature", "X", "0 always takes the likeliest token", "0; OpenAI form: 1", KVF__ARG_NUMBER, AT(temperature), 0,
     100, NULL},
    {"top-k", "N", "sample among the N likeliest tokens; 0: all", "0", KVF__ARG_COUNT, AT(top_k), 0, U32_LIMIT, NULL},
    {"top-p", "X", "sample among the likeliest tokens that together have this probability; 0 or 1: all", "1",
     KVF__ARG_NUMBER, AT(top_p), 0, 1, NULL},
    {"seed", "N", "seed of sampling; line n of the input gets N + n - 1", "0", KVF__ARG_SEED, AT(seed), 0, 0, NULL},
    {"stop", "TEXT", "end before this text; may be given several times", NULL, KVF__ARG_LIST, AT(stop), 0, 0, NULL},
    {"n", "N", "answers to each request; its prompt is computed once, and sample i has the request's seed + i", "1",
     KVF__ARG_COUNT, AT(n), 1, KVF_SAMPLES_MAX, NULL},
    {"best-of", "N", "draw N samples and answer with the n of the best mean log-probability", "n", KVF__ARG_COUNT,
     AT(best_of), 1, KVF_SAMPLES_MAX, NULL},
    {"beam-width", "N", "beam search over N hypotheses in place of sampling; the n best are the answers", "no beams",
     KVF__ARG_COUNT, AT(beam_width), 1, KVF_SAMPLES_MAX, NULL},
    {"length-penalty", "X",
     "score of a hypothesis: sum of its log-probabilities / its tokens ^ X; 0 compares sums, larger X favours "
     "longer ones",
     "1", KVF__ARG_NUMBER, AT(length_penalty), -100, 100, NULL},
};
static const kvf__arg_group sampling_group = {"Generation (a line of the input may set its own)", sampling_args,
                                              N(sampling_args), NULL};

/* The policy's own options follow these two, from the library's table. */
enum { MAX_POLICY_ARGS = 64 };
static kvf__arg policy_args[MAX_POLICY_ARGS] = {
    {"policy", "NAME", NULL, "full; with an option below, and with --compare full, d2o", KVF__ARG_TEXT, AT(policy), 0,
     0, NULL},
    {"preset", "NAME", "set of options; --help-policies lists them", "paper", KVF__ARG_TEXT, AT(preset), 0, 0, NULL},
};
static char policy_help[200], policy_helps[MAX_POLICY_ARGS][480], policy_fallbacks[MAX_POLICY_ARGS][48];
static kvf__arg_group policy_group = {
    "Policy: which tokens the cache keeps (a line of the input may set its own)", policy_args, 2,
    "  Defaults are those of d2o, preset paper; another policy or preset has its own. A line that names its own\n"
    "  policy or preset starts from that; of the command line's options only the budgets (rho, budget-tokens,\n"
    "  budget-bytes, min-tokens) apply to it too."};

/* The same in eval, which sets some of them itself where it compares policies. */
static kvf__arg eval_policy_args[MAX_POLICY_ARGS];
static kvf__arg_group eval_policy_group = {
    "Policy: which tokens the cache keeps", eval_policy_args, 0,
    "  Defaults are those of d2o, preset paper; another policy or preset has its own. Only --prompt N takes --policy,\n"
    "  --preset and a budget (rho, budget-tokens, budget-bytes, min-tokens): elsewhere --rhos says how much is kept."};
static const struct {
    const char *name, *fallback;
} eval_defaults[] = {{"policy", "d2o"},
                     {"rho", "with --prompt N 0.2, else --rhos"},
                     {"budget_tokens", "0"},
                     {"budget_bytes", "0"},
                     {"min_tokens", "with --prompt N 64, else 0"},
                     {"budget_unit", "with --prompt N token, else block"},
                     {"evict_every", "with --prompt N 1, else half a block"},
                     {"cam_seed", "with --prompt N 0, else --seeds"}};

static const kvf__arg memory_args[] = {
    {"kv-memory", "SIZE", "memory for K and V: plain bytes, or with KiB, MiB or GiB", "512MiB", KVF__ARG_BYTES,
     AT(kv_memory), 0, 0, NULL},
    {"host-memory", "SIZE", "host memory for preempted requests, which continue from there, and for cached prompts",
     "none", KVF__ARG_BYTES, AT(host_memory), 0, 0, NULL},
    {"preempt", "HOW",
     "what happens to a preempted request: swap: it moves to --host-memory while that has room; recompute: it "
     "is computed again; auto: recompute if one chunk restores it, else swap",
     "auto", KVF__ARG_CHOICE, AT(preempt), 0, 0, "auto|recompute|swap"},
    {"order", "HOW",
     "which waiting request is next: arrival, priority (of its line), deadline (of its line), shortest (prompt), or "
     "prefix (prompts that begin alike one after another); memory is taken from the last first",
     "arrival", KVF__ARG_CHOICE, AT(order), 0, 0, "arrival|priority|deadline|shortest|prefix"},
    {"kv-dtype", "TYPE", "type of K and V: fp16, bf16 or fp32", "fp16", KVF__ARG_CHOICE, AT(kv_dtype), 0, 0,
     "fp16|bf16|fp32"},
    {"block-size", "N", "tokens a block holds: 8, 16, 32, 64, 128 or 256", "16", KVF__ARG_COUNT, AT(block_size), 8, 256,
     "8|16|32|64|128|256"},
    {"heads-per-group", "N", "KV heads that share a block table; divides the model's KV heads",
     "all of a layer; 1 with budget global", KVF__ARG_COUNT, AT(heads_per_group), 1, 1024, NULL},
    {"probe", "FILE", "the probe of the model, for policies with score probe",
     "what kvfold calibrate has made for this model", KVF__ARG_TEXT, AT(probe), 0, 0, NULL},
    {"chunk", "N", "tokens of a prompt computed in one step; a multiple of the block size", "512", KVF__ARG_COUNT,
     AT(chunk), 8, 1048576, NULL},
    {"prefix-cache", "WHEN",
     "on: prompts that begin alike share the blocks of their common beginning, which stay when a prompt ends "
     "until their memory is needed; a policy that observes prompts continues from snapshots of its sums",
     "on", KVF__ARG_CHOICE, AT(prefix_cache), 0, 0, "on|off"},
    {"prefix-offload", "WHEN",
     "on: with --host-memory, cached prompts are copied there before their memory is needed, and copied back "
     "on a hit",
     "on", KVF__ARG_CHOICE, AT(prefix_offload), 0, 0, "on|off"},
    {"prefix-dir", "DIRECTORY",
     "folder in which prompts with a prefix_name are kept across runs: loaded if the file exists, else saved "
     "when the first line with that name has ended; a file that is damaged or of another model is replaced",
     NULL, KVF__ARG_TEXT, AT(prefix_dir), 0, 0, NULL},
    {"snapshot-memory", "SIZE", "memory for these snapshots, in addition to the others",
     "a twentieth of --kv-memory and --host-memory", KVF__ARG_BYTES, AT(snapshot_memory), 0, 0, NULL},
    {"max-running", "N", "largest number of requests in the batch at once", "64", KVF__ARG_COUNT, AT(max_running), 1,
     65536, NULL},
    {"context", "N", "positions that a request may reach; it then ends with length", "the model's", KVF__ARG_COUNT,
     AT(context), 2, U32_LIMIT, NULL},
    {"deterministic", NULL,
     "answers are the same to the byte in any batch: for any max-running, threads, chunk and order of lines, "
     "after --resume, and when memory was short; long prompts take about a tenth longer",
     NULL, KVF__ARG_FLAG, AT(deterministic), 0, 0, NULL},
    {"fast-activations", NULL,
     "round activations to 8 bits in products with weights of Q4_0, Q4_1 and Q8_0: faster, but answers change "
     "(logits of SmolLM2 by 0.2 in the mean square, 2.5 at most); other types are not affected",
     NULL, KVF__ARG_FLAG, AT(fast_activations), 0, 0, NULL},
};
static const kvf__arg_group memory_group = {"Memory and batch", memory_args, N(memory_args), NULL};

static const kvf__arg report_args[] = {
    {"compare", "POLICY",
     "run the same requests again in the same KV memory with this policy (full, h2o, d2o:serving); the summary has both, and "
     "how many answers are the same",
     NULL, KVF__ARG_TEXT, AT(compare), 0, 0, NULL},
    {"compare-output", "FILE",
     "results of the second run, each with differs_at: the number of its first token that differs from the "
     "first run's, or null",
     "not kept", KVF__ARG_TEXT, AT(compare_output), 0, 0, NULL},
    {"stats", "FILE", "one JSON object per step: time, requests, tokens, free blocks, blocks per layer", NULL,
     KVF__ARG_TEXT, AT(stats), 0, 0, NULL},
    {"json", NULL, "the summary as one JSON object on standard output", NULL, KVF__ARG_FLAG, AT(json), 0, 0, NULL},
    {"quiet", NULL, "no summary, progress or warnings; errors are still reported", NULL, KVF__ARG_FLAG, AT(quiet), 0, 0,
     NULL},
    {"verbose", NULL, "with --prompt: print the whole summary instead of one line of figures", NULL, KVF__ARG_FLAG,
     AT(verbose), 0, 0, NULL},
};
static const kvf__arg occupancy_args[] = {
    {"report", "FILE",
     "occupancy of the KV cache as one self-contained HTML page: memory held against a full cache, the pool "
     "and what freed its blocks, blocks of each layer over time, budgets and why, the slowest moments",
     NULL, KVF__ARG_TEXT, AT(report), 0, 0, NULL},
    {"trace", "FILE", "what ran when, and the blocks of each layer, in the Chrome trace format (opens in Perfetto)",
     NULL, KVF__ARG_TEXT, AT(trace), 0, 0, NULL},
    {"record", "FILE",
     "the requests as a trace that kvfold profile replays (docs/trace.md), with the layers' densities", NULL,
     KVF__ARG_TEXT, AT(record), 0, 0, NULL},
    {"metrics", "FILE",
     "occupancy figures at the end: as JSON (.json), as CSV with a row per moment (.csv), or as Prometheus "
     "text (any other name)",
     NULL, KVF__ARG_TEXT, AT(metrics), 0, 0, NULL},
};
static const kvf__arg_group occupancy_group = {"Occupancy", occupancy_args, N(occupancy_args), NULL};

static const kvf__arg replay_args[] = {
    {"limit", "N", "replay only the first N requests", "all", KVF__ARG_COUNT, AT(limit), 1, U32_LIMIT, NULL},
    {"speed", "X", "requests arrive X times as fast", "1", KVF__ARG_NUMBER, AT(speed), 1e-6, 1e9, NULL},
    {"step-ms", "X", "milliseconds that a step takes", "20", KVF__ARG_NUMBER, AT(step_ms), 0.001, 1e6, NULL},
    {"token-us", "X", "additional microseconds for each token of a step", "100", KVF__ARG_NUMBER, AT(token_us), 0, 1e6,
     NULL},
    {"densities", "FILE",
     "densities of the layers, one number each, for requests without their own; by default they are generated "
     "from --seed",
     NULL, KVF__ARG_TEXT, AT(densities), 0, 0, NULL},
    {"seed", "N", "seed of --generate and of generated densities", "0", KVF__ARG_SEED, AT(seed), 0, 0, NULL},
    {"json", NULL, "the summary as one JSON object on standard output", NULL, KVF__ARG_FLAG, AT(json), 0, 0, NULL},
    {"quiet", NULL, "no summary or progress; errors are still reported", NULL, KVF__ARG_FLAG, AT(quiet), 0, 0, NULL},
};
static const kvf__arg_group replay_group = {"Replay", replay_args, N(replay_args), NULL};

static const kvf__arg make_args[] = {
    {"generate", "N", "generate a trace of N requests instead of reading one; --record FILE keeps it", NULL,
     KVF__ARG_COUNT, AT(generate), 1, 100000000, NULL},
    {"arrivals", "KIND", "poisson, or bursty: several at once, then a longer gap, at the same rate", "poisson",
     KVF__ARG_CHOICE, AT(arrivals), 0, 0, "poisson|bursty"},
    {"rate", "X", "requests a second", "2", KVF__ARG_NUMBER, AT(rate), 1e-6, 1e6, NULL},
    {"burst", "X", "mean number of requests in a burst", "8", KVF__ARG_NUMBER, AT(burst), 1, 1e6, NULL},
    {"prompt-mean", "X", "mean of the prompts' lengths, which are log-normal", "512", KVF__ARG_NUMBER, AT(prompt_mean),
     1, 1e6, NULL},
    {"prompt-sigma", "X", "sigma of their logarithm", "0.8", KVF__ARG_NUMBER, AT(prompt_sigma), 0, 4, NULL},
    {"output-mean", "X", "mean of the outputs' lengths, log-normal too", "128", KVF__ARG_NUMBER, AT(output_mean), 1,
     1e6, NULL},
    {"output-sigma", "X", "sigma of their logarithm", "0.8", KVF__ARG_NUMBER, AT(output_sigma), 0, 4, NULL},
    {"prefix-groups", "N", "groups of requests that begin alike", "0", KVF__ARG_COUNT, AT(prefix_groups), 0, 1024,
     NULL},
    {"shared-tokens", "N", "leading tokens that the requests of a group share", "256", KVF__ARG_COUNT,
     AT(shared_tokens), 1, 1048576, NULL},
    {"grouped", "X", "share of the requests that belong to a group", "0.5", KVF__ARG_NUMBER, AT(grouped), 0, 1, NULL},
};
static const kvf__arg_group make_group = {"A generated trace", make_args, N(make_args), NULL};

static const kvf__arg pool_args[] = {
    {"blocks", "N", "blocks of the pool, in place of --kv-memory", NULL, KVF__ARG_COUNT, AT(n_blocks), 1, 2147483648.0,
     NULL},
    {"kv-memory", "SIZE", "memory for K and V that the pool simulates: plain bytes, or with KiB, MiB or GiB", "512MiB",
     KVF__ARG_BYTES, AT(kv_memory), 0, 0, NULL},
    {"layers", "N", "layers", "those of the trace's densities, else 30", KVF__ARG_COUNT, AT(n_layers), 1, 1024, NULL},
    {"kv-heads", "N", "KV heads of a layer", "3", KVF__ARG_COUNT, AT(n_kv_heads), 1, 1024, NULL},
    {"q-heads", "N", "query heads of a layer; they determine the size of a snapshot", "three times the KV heads",
     KVF__ARG_COUNT, AT(n_q_heads), 1, 65536, NULL},
    {"head-dim", "N", "width of a head", "64", KVF__ARG_COUNT, AT(head_dim), 1, 1024, NULL},
    {"kv-dtype", "TYPE", "type of K and V: fp16, bf16 or fp32", "fp16", KVF__ARG_CHOICE, AT(kv_dtype), 0, 0,
     "fp16|bf16|fp32"},
    {"heads-per-group", "N", "KV heads that share a block table; divides the KV heads", "all of a layer",
     KVF__ARG_COUNT, AT(heads_per_group), 1, 1024, NULL},
    {"block-size", "N", "tokens a block holds: 8, 16, 32, 64, 128 or 256", "16", KVF__ARG_COUNT, AT(block_size), 8, 256,
     "8|16|32|64|128|256"},
    {"chunk", "N", "tokens of a prompt computed in one step; a multiple of the block size", "512", KVF__ARG_COUNT,
     AT(chunk), 8, 1048576, NULL},
    {"prefix-cache", "WHEN",
     "on: prompts that begin alike by the trace share blocks, which stay until their memory is needed; a "
     "policy that observes prompts continues from snapshots",
     "on", KVF__ARG_CHOICE, AT(prefix_cache), 0, 0, "on|off"},
    {"snapshot-memory", "SIZE", "simulated memory for snapshots, in addition to --kv-memory", "a twentieth of the pool",
     KVF__ARG_BYTES, AT(snapshot_memory), 0, 0, NULL},
    {"max-running", "N", "largest number of requests in the batch at once", "64", KVF__ARG_COUNT, AT(max_running), 1,
     65536, NULL},
    {"context", "N", "positions a request may reach", "as many as the trace needs", KVF__ARG_COUNT, AT(context), 2,
     1073741824, NULL},
};
static const kvf__arg_group pool_group = {"The pool (by default that of kvfold run with its default model)", pool_args,
                                          N(pool_args), NULL};

static const kvf__arg_group report_group = {"Reports", report_args, N(report_args), NULL};

static const kvf__arg tokenize_args[] = {
    {"file", "FILE", "text of a file in place of TEXT; - is standard input", NULL, KVF__ARG_TEXT, AT(file), 0, 0, NULL},
    {"decode", "IDS", "convert ids (\"504,3575\" or \"[504, 3575]\") to text", NULL, KVF__ARG_TEXT, AT(decode), 0, 0,
     NULL},
    {"plain", NULL,
     "control tokens written out in the text (<|im_end|>) stay plain text instead of becoming control tokens", NULL,
     KVF__ARG_FLAG, AT(plain), 0, 0, NULL},
    {"special", NULL, "with --decode: show control tokens", NULL, KVF__ARG_FLAG, AT(special), 0, 0, NULL},
    {"model", "FILE", "GGUF file whose tokenizer is used", "as in kvfold run", KVF__ARG_TEXT, AT(model), 0, 0, NULL},
    {"json", NULL, "one JSON object: token_ids, or text with --decode", NULL, KVF__ARG_FLAG, AT(json), 0, 0, NULL},
};
static const kvf__arg calibrate_args[] = {
    {"model", "FILE", "GGUF file of a Llama-family model", "as in kvfold run", KVF__ARG_TEXT, AT(model), 0, 0, NULL},
    {"threads", "N", "threads", "the CPUs there are", KVF__ARG_COUNT, AT(threads), 1, 1024, NULL},
    {"text", "FILE", "a text to fit to; may be given several times", "the project's own prose and code", KVF__ARG_LIST,
     AT(texts), 0, 0, NULL},
    {"prompts", "N", "prompts; every fifth is held out and measured", "20", KVF__ARG_COUNT, AT(prompts), 5, 100000,
     NULL},
    {"context", "N", "tokens of a prompt", "1024", KVF__ARG_COUNT, AT(context), 64, 1048576, NULL},
    {"seed", "N", "of the places in the texts and of the made-up facts", "0", KVF__ARG_SEED, AT(seed), 0, 0, NULL},
    {"output", "FILE", "where the probe goes", "the user's cache, where kvfold run finds it by the model's digest",
     KVF__ARG_TEXT, AT(output), 0, 0, NULL},
    {"json", NULL, "print JSON instead of text", NULL, KVF__ARG_FLAG, AT(json), 0, 0, NULL},
    {"quiet", NULL, "no progress, no warnings", NULL, KVF__ARG_FLAG, AT(quiet), 0, 0, NULL},
};
static const kvf__arg_group calibrate_group = {"Options", calibrate_args, N(calibrate_args), NULL};

static const kvf__arg_group tokenize_group = {"Options", tokenize_args, N(tokenize_args), NULL};

static const kvf__arg info_args[] = {
    {"model", "FILE", "model file, instead of the argument", "as in kvfold run", KVF__ARG_TEXT, AT(model), 0, 0, NULL},
    {"json", NULL, "one JSON object", NULL, KVF__ARG_FLAG, AT(json), 0, 0, NULL},
};
static const kvf__arg_group info_group = {"Options", info_args, N(info_args), NULL};

static const kvf__arg info_run_args[] = {
    {"kv-memory", "SIZE", "memory for K and V", "512MiB", KVF__ARG_BYTES, AT(kv_memory), 0, 0, NULL},
    {"host-memory", "SIZE", "host memory", "none", KVF__ARG_BYTES, AT(host_memory), 0, 0, NULL},
    {"max-running", "N", "largest number of requests in the batch at once", "64", KVF__ARG_COUNT, AT(max_running), 1,
     65536, NULL},
    {"context", "N", "positions that a request may reach", "the model's", KVF__ARG_COUNT, AT(context), 2, U32_LIMIT,
     NULL},
    {"chunk", "N", "tokens of a prompt computed in one step", "512", KVF__ARG_COUNT, AT(chunk), 8, 1048576, NULL},
    {"threads", "N", "threads", "the CPUs there are", KVF__ARG_COUNT, AT(threads), 1, 1024, NULL},
};
static const kvf__arg_group info_run_group = {"The run whose memory is told", info_run_args, N(info_run_args), NULL};

static const kvf__arg eval_args[] = {
    {"policies", "LIST",
     "policies to compare with the full cache: [LABEL=]POLICY[:PRESET][,OPTION=VALUE]..., separated by ; "
     "(\"h2o;d2o:authors;mine=d2o,score=sqrt\"), or all; may be given several times. The policy options below "
     "apply to all of them, before their own",
     "all", KVF__ARG_LIST, AT(policies), 0, 0, NULL},
    {"rhos", "LIST", "shares of the prompt's blocks that policies may hold", "0.2", KVF__ARG_TEXT, AT(rhos), 0, 0,
     NULL},
    {"contexts", "LIST", "lengths of the prompts, in tokens", "1024", KVF__ARG_TEXT, AT(contexts), 0, 0, NULL},
    {"seeds", "LIST", "seeds of tasks, and of policies that make random choices", "0", KVF__ARG_TEXT, AT(seeds), 0, 0,
     NULL},
    {"text", "FILE",
     "a text to measure on, or to hide facts in: FILE, KIND=FILE or KIND:NAME=FILE; KIND is novel, essay, "
     "code, dialogue, problems or text; - is standard input; may be given several times",
     NULL, KVF__ARG_LIST, AT(texts), 0, 0, NULL},
    {"scored", "N", "tokens scored after each prompt", "256", KVF__ARG_COUNT, AT(scored), 1, 1048576, NULL},
    {"windows", "N", "places of each text, one after another", "1", KVF__ARG_COUNT, AT(windows), 1, 65536, NULL},
    {"offset", "N", "token of the text at which the first place begins", "0", KVF__ARG_COUNT, AT(offset), 0, U32_LIMIT,
     NULL},
    {"samples", "N", "samples of each task, depth and context", "10", KVF__ARG_COUNT, AT(samples), 1, 65536, NULL},
    {"tasks", "LIST", "tasks of recall: single, multikey, multivalue, tracking, words, names, table, code",
     "all of them", KVF__ARG_TEXT, AT(tasks), 0, 0, NULL},
    {"placement", "WHERE", "place of the question: inside the compressed prompt, after its compression, or both",
     "both", KVF__ARG_CHOICE, AT(placement), 0, 0, "inside|after|both"},
    {"depths", "LIST", "depths of the needle: 0 is the prompt's beginning, 1 its end", "0,0.25,0.5,0.75,1",
     KVF__ARG_TEXT, AT(depths), 0, 0, NULL},
    {"dialogue", "FILE", "dialogues, one JSON object a line; may be given several times", NULL, KVF__ARG_LIST,
     AT(dialogues), 0, 0, NULL},
    {"tables", "LIST", "tables of ablation: 4, 6, 7, 8, 9 of the D2O paper", "all", KVF__ARG_TEXT, AT(tables), 0, 0,
     NULL},
};
static const kvf__arg_group eval_group = {"What is measured", eval_args, N(eval_args), NULL};

static const kvf__arg eval_run_args[] = {
    {"output", "FILE", "records, one JSON object a line; - is standard output", "-", KVF__ARG_TEXT, AT(output), 0, 0,
     NULL},
    {"resume", NULL,
     "continue the --output FILE of an earlier run: skip its cells, drop an incomplete last line; refused if "
     "the model, a text or an option that changes figures differs",
     NULL, KVF__ARG_FLAG, AT(resume), 0, 0, NULL},
    {"force", NULL, "--resume in any case; without --resume: overwrite the output", NULL, KVF__ARG_FLAG, AT(force), 0,
     0, NULL},
    {"batch", "N", "largest number of cells that share one computation of a prompt", "64", KVF__ARG_COUNT, AT(batch), 1,
     120, NULL},
    {"kv-memory", "SIZE", "largest memory for K and V, taken as needed. With --prompt: the pool, 512MiB",
     "half of the machine's", KVF__ARG_BYTES, AT(eval_memory), 0, 0, NULL},
    {"kv-dtype", "TYPE", "type of K and V: fp16, bf16 or fp32", "fp16", KVF__ARG_CHOICE, AT(kv_dtype), 0, 0,
     "fp16|bf16|fp32"},
    {"block-size", "N", "tokens a block holds: 8, 16, 32, 64, 128 or 256", "16", KVF__ARG_COUNT, AT(block_size), 8, 256,
     "8|16|32|64|128|256"},
    {"heads-per-group", "N", "KV heads that share a block table; divides the model's KV heads",
     "all of a layer; 1 with budget global", KVF__ARG_COUNT, AT(heads_per_group), 1, 1024, NULL},
    {"probe", "FILE", "the probe of the model, for policies with score probe",
     "what kvfold calibrate has made for this model", KVF__ARG_TEXT, AT(probe), 0, 0, NULL},
    {"chunk", "N", "tokens of a prompt computed in one step; a multiple of the block size", "512", KVF__ARG_COUNT,
     AT(chunk), 8, 1048576, NULL},
    {"context", "N", "positions for a prompt and the tokens after it", "the model's", KVF__ARG_COUNT, AT(context), 2,
     U32_LIMIT, NULL},
    {"deterministic", NULL, "figures are the same to the bit for any batch, threads and chunk", NULL, KVF__ARG_FLAG,
     AT(deterministic), 0, 0, NULL},
    {"fast-activations", NULL, "as in kvfold run", NULL, KVF__ARG_FLAG, AT(fast_activations), 0, 0, NULL},
    {"quiet", NULL, "no progress, no warnings", NULL, KVF__ARG_FLAG, AT(quiet), 0, 0, NULL},
};
static const kvf__arg_group eval_run_group = {"The run", eval_run_args, N(eval_run_args), NULL};

static const kvf__arg eval_single_args[] = {
    {"prompt", "N",
     "number of tokens of --text or --ids that form the prompt; those after it are scored, one step each", NULL,
     KVF__ARG_COUNT, AT(n_prompt), 1, U32_LIMIT, NULL},
    {"ids", "FILE", "tokens: a JSON list, or an object with `token_ids` or `ids`; - is standard input", NULL,
     KVF__ARG_TEXT, AT(ids), 0, 0, NULL},
    {"max-tokens", "N", "number of tokens to score, at most", "all", KVF__ARG_COUNT, AT(max_tokens), 1, U32_LIMIT,
     NULL},
    {"json", NULL, "one JSON object, with nll of every token", NULL, KVF__ARG_FLAG, AT(json), 0, 0, NULL},
};
static const kvf__arg_group eval_single_group = {"One text and one policy, reported at once (nll --prompt N)",
                                                 eval_single_args, N(eval_single_args), NULL};

static const kvf__arg eval_report_args[] = {
    {"html", "FILE", "one page with plots: score by ratio, NLL by position, needle maps, layers, texts", NULL,
     KVF__ARG_TEXT, AT(html), 0, 0, NULL},
    {"markdown", "FILE", "tables for a document: over all, and by context", NULL, KVF__ARG_TEXT, AT(markdown), 0, 0,
     NULL},
    {"baseline", "NAME",
     "baseline for every policy: a policy of the records, or best: the best published one at each rho",
     "h2o; best if the records have none", KVF__ARG_TEXT, AT(baseline), 0, 0, NULL},
    {"only", "SOURCES", "use only these sources; names separated by commas", NULL, KVF__ARG_TEXT, AT(only), 0, 0, NULL},
    {"except", "SOURCES", "leave these sources out, such as those that a policy was tuned on", NULL, KVF__ARG_TEXT,
     AT(except), 0, 0, NULL},
    {"resample", "WHAT", "what the bootstrap draws: pairs (single places or samples), or whole sources", "pairs",
     KVF__ARG_CHOICE, AT(resample), 0, 0, "pairs|sources"},
};
static const kvf__arg_group eval_report_group = {"kvfold eval report", eval_report_args, N(eval_report_args), NULL};

/* ---- Commands ----------------------------------------------------------------------------------- */

static const kvf__arg_group *const run_groups[] = {&run_group,    &sampling_group,  &model_group,
                                                   &memory_group, &report_group,    &batch_group,
                                                   &policy_group, &occupancy_group, NULL};
static const kvf__arg_group *const tokenize_groups[] = {&tokenize_group, NULL};
static const kvf__arg_group *const info_groups[] = {&info_group, &info_run_group, NULL};
static const kvf__arg_group *const calibrate_groups[] = {&calibrate_group, NULL};
static const kvf__arg_group *const profile_groups[] = {&replay_group, &make_group,      &pool_group,
                                                       &policy_group, &occupancy_group, NULL};
static const kvf__arg_group *const eval_groups[] = {
    &eval_group, &eval_run_group, &model_group, &eval_policy_group, &eval_single_group, &eval_report_group, NULL};

static const char run_notes[] =
    "Input lines:\n"
    "  {\"id\": \"a\", \"prompt\": \"Once upon a time\", \"max_tokens\": 64}\n"
    "  {\"id\": \"b\", \"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}], \"policy\": \"h2o\", \"rho\": 0.4}\n"
    "  id              string or whole number [the line's number]; each once\n"
    "  prompt          text to continue, as it stands, or\n"
    "  messages        a dialogue, formatted by the chat template (--chat-template if the model has none), or\n"
    "  token_ids       ids of tokens\n"
    "  max_tokens, temperature, top_k, top_p, seed, stop (text or list), ignore_eos (true: end tokens do not end it),\n"
    "  policy, preset, and the policy's options by name; null counts as left out, and 2.0 as a whole number\n"
    "  n               number of answers, with seed, seed + 1, ...; from 2 on the output has `choices`\n"
    "  best_of         number of samples; the n with the best mean log-probability are the answers\n"
    "  beam_width, length_penalty\n"
    "                  beam search in place of sampling; the n best hypotheses are the answers, best first\n"
    "  prefix_end      leading tokens of the prompt that other lines share, a multiple of the block size: a policy that\n"
    "                  observes prompts can continue there\n"
    "  prefix_name     keeps this prompt, up to its prefix_end, across runs in --prefix-dir: letters, digits, - _ .\n"
    "  cache_salt      text of up to 64 bytes: prompts of different salts share nothing\n"
    "  priority, deadline\n"
    "                  for --order: -1000 to 1000; seconds from submission\n"
    "  logprobs        true: the log-probability of each token; N up to 20: also of the N likeliest tokens\n"
    "  A bad line is reported with its number, on standard error and as a result with finish_reason error.\n"
    "\n"
    "Output lines:\n"
    "  id, text, token_ids, finish_reason (stop, length or error), stop_reason (of stop: the stop string, null for an\n"
    "  end token; in the OpenAI form too), and if the KV memory was full before max_tokens: limited_by (\"kv_memory\") and\n"
    "  kv_memory_bytes (in the OpenAI form in the choice; --resume with more --kv-memory computes it again),\n"
    "  prompt_tokens, completion_tokens, cached_tokens (of the prompt, found in the prefix cache; not with --deterministic),\n"
    "  kv: policy, rho, held_tokens and full_tokens (slots over all layers: held at the end, and with a full cache),\n"
    "  blocks (per layer, at the end), kept, merged, dropped (tokens over layers and KV heads);\n"
    "  of several samples or beams, each: index, score (mean log-probability; beams: see length_penalty), and in kv\n"
    "  own_blocks and shared_blocks (over all layers, at its end: held by it alone, and together with others);\n"
    "  with finish_reason error: error and the line's number; an unknown figure of kv is null\n"
    "  --output FILE begins with a line {\"kvfold\": ...} with the model and options, for --resume. Its answers have\n"
    "  line_hash, a hash of the line's fields, by which --resume recognises the line.\n"
    "\n"
    "OpenAI batch files: a line that has custom_id, method, url or body is read and answered in that form:\n"
    "  {\"custom_id\": \"a\", \"method\": \"POST\", \"url\": \"/v1/chat/completions\",\n"
    "   \"body\": {\"model\": \"...\", \"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}}\n"
    "  url             /v1/chat/completions or /v1/completions, line by line\n"
    "  body            model, messages or prompt, max_tokens, max_completion_tokens, temperature, top_p, seed, stop, n,\n"
    "                  best_of (completions), logprobs, top_logprobs, top_k, ignore_eos, cache_salt; kvfold: {policy, preset,\n"
    "                  the policy's options, prefix_end, prefix_name, priority, deadline};\n"
    "                  fields that ask for nothing (user, stream false, frequency_penalty 0, ...) are accepted\n"
    "  A bad line has error, and response with status_code 400 (404: another model's name) and body.error.\n"
    "  The header of such an output is a file beside it, OUTPUT.kvfold-header.json, and the hash of an answer's line ends\n"
    "  its id (batch_req-kvfold-LINE-HASH). Lines of both forms may be mixed:\n"
    "  each is answered in its own, and the first decides where the header goes.\n"
    "\n"
    "Exit status: 0 all requests ended well, 1 some did not, 2 nothing was run, 3 an output could not be written,\n"
    "  4 the engine failed, 130 interrupted (finished answers are written)";

static const char eval_notes[] =
    "Measures (docs/eval.md):\n"
    "  nll             negative log-likelihood, in nats, of the tokens after a prompt, each step fed with the true token\n"
    "  divergence      the same, with the divergence KL(full cache || policy) and whether both have the same likeliest token\n"
    "  needle          a fact at each of --depths in a text, asked for at its end\n"
    "  recall          facts of four tasks, generated from a seed\n"
    "  multiturn       dialogues: the first turns are compressed, later ones follow\n"
    "  ablation        divergence of the variants that the paper's tables compare\n"
    "  report          reports on files of records: means with intervals, and every policy against a baseline\n"
    "  All policies and rhos over one prompt share its computation. Each may hold floor(rho * prompt * layers / block size)\n"
    "  blocks on average over the scored steps; one that holds more runs with a lower rho, or its cell says why it is empty.\n"
    "\n"
    "Exit status: 0 all is written, 1 nll --prompt N could not be scored, or a report left out lines that are not records,\n"
    "  2 nothing was run, 3 the output could not be written, 4 the engine failed, 130 interrupted: whole batches\n"
    "  are written, and --resume continues";

/* ---- The first screen of each command's help -------------------------------------------------------------- */

static const kvf__brief run_brief[] = {
    {"prompt", "a user's message, answered as it is generated"},
    {"input", "requests, a JSON object a line (also OpenAI batch files)"},
    {"output", "answers to these, a JSON object a line"},
    {"resume", "continue the --output of an earlier run"},
    {"model", "GGUF file of a Llama-family model"},
    {"max-tokens", "tokens to generate for a request, at most"},
    {"temperature", "0 always takes the likeliest token"},
    {"seed", "seed of sampling"},
    {"system", "system message"},
    {"kv-memory", "memory for K and V"},
    {"policy", "which tokens the cache keeps (see --help-policies)"},
    {"rho", "share of tokens kept; alone it means d2o"},
    {"compare", "run again with this policy, and print both"},
    {"report", "occupancy of the cache over time, as an HTML page"},
    {"json", "the summary as JSON"},
    {"quiet", "no summary, progress or warnings"},
    {NULL, NULL},
};
static const kvf__brief eval_brief[] = {
    {"text", "a text to measure on, or to hide facts in"},
    {"policies", "what is measured, as \"h2o;d2o:serving\""},
    {"rhos", "shares of the prompt's blocks that may be held"},
    {"contexts", "lengths of the prompts, in tokens"},
    {"scored", "tokens scored after each prompt"},
    {"samples", "samples of each task, depth and context"},
    {"output", "records, a JSON object a line"},
    {"resume", "continue the --output of an earlier run"},
    {"model", "GGUF file of a Llama-family model"},
    {"policy", "policy of nll --prompt N, with --rho"},
    {"quiet", "no progress, no warnings"},
    {NULL, NULL},
};
static const kvf__brief profile_brief[] = {
    {"generate", "generate a trace of N requests instead of reading one"},
    {"rate", "its requests per second"},
    {"prompt-mean", "mean tokens of its prompts"},
    {"output-mean", "mean tokens of its answers"},
    {"limit", "replay only the first N requests"},
    {"policy", "which tokens the cache keeps (see --help-policies)"},
    {"rho", "share of tokens kept; alone it means d2o"},
    {"kv-memory", "memory that the pool simulates"},
    {"layers", "layers of the model; also --kv-heads, --head-dim"},
    {"max-running", "largest number of requests in the batch at once"},
    {"report", "occupancy of the cache over time, as an HTML page"},
    {"metrics", "figures at the end: JSON, CSV or Prometheus text"},
    {"json", "the summary as JSON"},
    {"quiet", "no summary, no progress"},
    {NULL, NULL},
};

static const kvf__arg report_json_args[] = {
    {"json", NULL, "one JSON object instead of the table", NULL, KVF__ARG_FLAG, AT(json), 0, 0, NULL},
    {"quiet", NULL, "no warnings", NULL, KVF__ARG_FLAG, AT(quiet), 0, 0, NULL},
};
static const kvf__arg_group report_json_group = {"Output", report_json_args, N(report_json_args), NULL};
static const kvf__arg_group *const report_groups[] = {&eval_report_group, &report_json_group, NULL};

static const kvf__command report_command = {
    "eval report",
    "Compare the records of the other measures, with intervals.",
    "  kvfold eval report FILE... [options]",
    "  FILE: what kvfold eval wrote with --output; - is standard input. A table is printed.\n"
    "  Exit status: 0 all is shown, 1 lines that are not records were left out, 2 nothing was shown,\n"
    "  3 an output could not be written.",
    report_groups,
    1,
    KVF__WORDS_MAX,
    "FILE",
    NULL,
    NULL,
    NULL};

const kvf__command kvf__commands[] = {
    {"run", "Generate: answers a prompt, or a file of requests as one batch.",
     "  kvfold run --prompt TEXT [options]\n  kvfold run --input FILE [--output FILE] [options]", run_notes, run_groups,
     0, 0, NULL, kvf__run_command, run_brief, NULL},
    {"tokenize", "Show the tokens of a text, or the text of tokens.",
     "  kvfold tokenize TEXT [options]\n"
     "  kvfold tokenize --file FILE [options]\n"
     "  kvfold tokenize --decode IDS [options]",
     NULL, tokenize_groups, 0, 1, "TEXT", kvf__tokenize_command, NULL, NULL},
    {"info", "Show a model file, its KV cache's size and what a run reserves.",
     "  kvfold info [MODEL] [--json] [--max-running N] [...]", NULL, info_groups, 0, 1, "MODEL", kvf__info_command,
     NULL, NULL},
    {"eval", "Measure policies against the full cache, at equal memory.",
     "  kvfold eval nll|divergence --text FILE... [options]\n"
     "  kvfold eval needle|recall [--text FILE...] [options]\n"
     "  kvfold eval multiturn --dialogue FILE... [options]\n"
     "  kvfold eval ablation --text FILE... [options]\n"
     "  kvfold eval nll (--ids FILE | --text FILE) --prompt N [options]\n"
     "  kvfold eval report FILE... [--html FILE] [--markdown FILE] [--json] [options]",
     eval_notes, eval_groups, 1, KVF__WORDS_MAX, "MEASURE", kvf__eval_command, eval_brief, &report_command},
    {"profile", "Replay a trace of requests against a pool, without a model.",
     "  kvfold profile TRACE [options]\n  kvfold profile --generate N [options]",
     "  TRACE: kvfold's own form (docs/trace.md), as kvfold run --record writes it, a table of the Azure LLM inference\n"
     "  traces (TIMESTAMP, ContextTokens, GeneratedTokens) or of BurstGPT (Timestamp, Request tokens, Response tokens), or\n"
     "  a Mooncake trace (JSON lines: timestamp, input_length, output_length, hash_ids); plain, gzip or zstd; - is\n"
     "  standard input. Scheduler, pool and budgets are the real ones. Of a model only the layers' densities matter:\n"
     "  those of the trace, of --densities, or generated ones. A step takes --step-ms, and --token-us for each token.",
     profile_groups, 0, 1, "TRACE", kvf__profile_command, profile_brief, NULL},
    {"calibrate", "Fit a probe to a model: scores for policies with score probe.", "  kvfold calibrate [options]",
     "  Half of the prompts are places of texts, half hold made-up names, numbers and words, between sentences or in lists.\n"
     "  The model repeats each prompt. What it then looks at is what a probe learns to foresee, one linear function of the\n"
     "  hidden state for each layer and KV head. Needs OpenBLAS or LAPACK (libopenblas0).\n"
     "  Exit status: 0 the probe is written, 2 nothing was run, 3 it could not be written, 4 the model failed.",
     calibrate_groups, 0, 0, NULL, kvf__calibrate_command, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, NULL, NULL, NULL},
};

kvf__cli kvf__cli_default(void) {
    kvf__cli cli;
    memset(&cli, 0, sizeof cli);
    cli.chat_template = "auto";
    cli.kv_dtype = "fp16";
    cli.block_size = 16;
    cli.chunk = 512;
    cli.max_running = 64;
    cli.kv_memory = (uint64_t)512 << 20;
    cli.top_p = 1;
    cli.temperature = -1;
    cli.length_penalty = 1;
    cli.sync = "second";
    cli.prefix_cache = "on";
    cli.prefix_offload = "on";
    cli.preempt = "auto";
    cli.order = "arrival";
    cli.rhos = "0.2";
    cli.contexts = "1024";
    cli.seeds = "0";
    cli.tasks = "single,multikey,multivalue,tracking,words,names,table,code";
    cli.placement = "both";
    cli.depths = "0,0.25,0.5,0.75,1";
    cli.scored = 256;
    cli.windows = 1;
    cli.samples = 10;
    cli.batch = 64;
    cli.prompts = 20;
    cli.arrivals = "poisson";
    cli.resample = "pairs";
    cli.n_kv_heads = 3;
    cli.head_dim = 64;
    cli.shared_tokens = 256;
    cli.rate = 2;
    cli.burst = 8;
    cli.prompt_mean = 512;
    cli.output_mean = 128;
    cli.prompt_sigma = cli.output_sigma = 0.8;
    cli.grouped = 0.5;
    cli.speed = 1;
    cli.step_ms = 20;
    cli.token_us = 100;
    return cli;
}

void kvf__options_init(void) {
    size_t used = (size_t)snprintf(policy_help, sizeof policy_help, "one of");
    const char *name;
    for (uint32_t i = 0; (name = kvf_policy_name(i)) && used < sizeof policy_help; i++)
        used += (size_t)snprintf(policy_help + used, sizeof policy_help - used, "%s %s", i ? "," : "", name);
    policy_args[0].help = policy_help;

    kvf_policy_options options;
    kvf__cli cli = kvf__cli_default();
    kvf__policy_name paper = {"d2o", ""};
    bool known = kvf__policy_options(&cli, &paper, true, &options, NULL) == KVF_OK;
    uint32_t n = 0;
    const kvf_policy_option_info *list = kvf_policy_option_list(&n);
    for (uint32_t i = 0; i < n && policy_group.n_args < MAX_POLICY_ARGS; i++) {
        uint32_t row = policy_group.n_args++;
        kvf__arg *a = &policy_args[row];
        char *text = policy_helps[row], *fallback = policy_fallbacks[row];
        snprintf(text, sizeof policy_helps[0], "%s Values: %s", list[i].summary, list[i].values);
        *a = (kvf__arg){list[i].name, "X", text, NULL, KVF__ARG_NAMED, AT(policy_options), 0, 0, NULL};
        if (known && !kvf_policy_option_get(&options, list[i].name, fallback, sizeof policy_fallbacks[0]))
            a->fallback = fallback;
    }
    eval_policy_group.n_args = policy_group.n_args;
    memcpy(eval_policy_args, policy_args, sizeof policy_args);
    for (size_t k = 0; k < N(eval_defaults); k++)
        for (uint32_t i = 0; i < eval_policy_group.n_args; i++)
            if (kvf__name_equal(eval_policy_args[i].name, eval_defaults[k].name))
                eval_policy_args[i].fallback = eval_defaults[k].fallback;
}
