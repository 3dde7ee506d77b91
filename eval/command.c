/* kvfold eval: chooses the measure. */
#include <string.h>

#include "eval/eval.h"
#include "eval/scores/scores.h"

int kvf__eval_command(const void *options) {
    const kvf__cli *cli = options;
    const char *word = cli->words[0];
    if (!kvf__eval_check_scope(cli, word)) return KVF__EXIT_USAGE;
    if (!strcmp(word, "report")) return kvf__eval_report(cli);
    if (cli->n_words > 1) {
        kvf__say("%s: one argument too many for kvfold eval %s; texts are given with --text FILE",
                 kvf__shown(cli->words[1]).text, word);
        return KVF__EXIT_USAGE;
    }
    if (!strcmp(word, "nll") && (cli->n_prompt || cli->ids)) return kvf__eval_single(cli);
    for (int m = 0; m <= KVF__MEASURE_ABLATION; m++)
        if (!strcmp(word, kvf__measure_names[m])) return kvf__eval_measure(cli, (kvf__measure)m);
    kvf__say("eval %s: the measures are nll, divergence, needle, recall, multiturn and ablation; report shows records",
             kvf__shown(word).text);
    return KVF__EXIT_USAGE;
}
