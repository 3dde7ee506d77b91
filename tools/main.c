/* kvfold: picks the command, reads its options, runs it. */
#define _POSIX_C_SOURCE 200809L
#include <locale.h>
#include <stdio.h>
#include <string.h>

#include "tools/cli.h"

static const char help_head[] =
    "kvfold: language models on a paged KV cache that compresses itself, layer by layer (D2O).\n"
    "\n"
    "  kvfold run --prompt \"Why is the sky blue?\"\n"
    "  kvfold run --input prompts.jsonl --output out.jsonl --policy d2o --rho 0.2 --compare full\n"
    "\n"
    "Commands:\n";

static const char help_tail[] =
    "  help        This text; help COMMAND, or help COMMAND OPTION, says more.\n"
    "\n"
    "Every command takes --help. Without --model, the model that scripts/fetch_model.sh fetched is used.\n"
    "Exit status: 0 all went well, 1 some requests failed, 2 nothing was run (usage, model, memory),\n"
    "  3 an output could not be written, 4 the engine failed, 130 interrupted.\n";

static int print_help(void) {
    fputs(help_head, stdout);
    for (const kvf__command *c = kvf__commands; c->name; c++) printf("  %-10s  %s\n", c->name, c->summary);
    fputs(help_tail, stdout);
    return kvf__stdout_done() ? KVF__EXIT_OK : KVF__EXIT_OUTPUT;
}

static const kvf__command *find_command(const char *name) {
    const char *nearest = NULL;
    uint32_t best = UINT32_MAX;
    for (const kvf__command *c = kvf__commands; c->name; c++) {
        if (!strcmp(c->name, name)) return c;
        uint32_t distance = kvf__name_distance(name, c->name);
        if (distance < best) best = distance, nearest = c->name;
    }
    if (name[0] == '-')
        kvf__say("%s: options follow a command, as in kvfold run --prompt TEXT; kvfold --help lists the commands",
                 kvf__shown(name).text);
    else if (nearest)
        kvf__say("unknown command %s: did you mean %s?", kvf__shown(name).text, nearest);
    else
        kvf__say("unknown command %s: kvfold --help lists what there is", kvf__shown(name).text);
    return NULL;
}

static int help_command(int argc, char **argv) {
    if (argc == 0) return print_help();
    const kvf__command *command = find_command(argv[0]);
    if (!command) return KVF__EXIT_USAGE;
    if (!kvf__args_help(command, argc > 1 ? argv[1] : NULL)) {
        kvf__say("kvfold %s has no option %s", command->name, kvf__shown(argv[1]).text);
        return KVF__EXIT_USAGE;
    }
    return kvf__stdout_done() ? KVF__EXIT_OK : KVF__EXIT_OUTPUT;
}

static int run_command(const kvf__command *command, int argc, char **argv) {
    kvf__cli cli = kvf__cli_default();
    kvf__args_result result = kvf__args_parse(command, argc, argv, &cli, cli.words, &cli.n_words, &cli.given);
    int code = KVF__EXIT_USAGE;
    if (result == KVF__ARGS_HELP)
        code = help_command(1, (char *[]){(char *)command->name, NULL});
    else if (result == KVF__ARGS_OK && cli.n_words < command->min_words)
        kvf__say("kvfold %s: %s is missing; kvfold %s --help", command->name, command->words, command->name);
    else if (result == KVF__ARGS_OK)
        code = command->run(&cli);
    kvf__arg_list_free(&cli.given);
    kvf__arg_list_free(&cli.policy_options);
    kvf__arg_list_free(&cli.stop);
    kvf__arg_list_free(&cli.served_names);
    kvf__arg_list_free(&cli.texts);
    kvf__arg_list_free(&cli.policies);
    kvf__arg_list_free(&cli.dialogues);
    return code;
}

int main(int argc, char **argv) {
    setlocale(LC_CTYPE, ""); /* for the chart: whether the terminal is UTF-8 */
    kvf__options_init();
    if (argc < 2) {
        print_help();
        return KVF__EXIT_USAGE;
    }
    const char *name = argv[1];
    if (!strcmp(name, "--help") || !strcmp(name, "-h")) return print_help();
    if (!strcmp(name, "help")) return help_command(argc - 2, argv + 2);
    if (!strcmp(name, "--version") || !strcmp(name, "-V") || !strcmp(name, "version")) {
        printf("kvfold %s\n", kvf_version());
        return kvf__stdout_done() ? KVF__EXIT_OK : KVF__EXIT_OUTPUT;
    }
    const kvf__command *command = find_command(name);
    return command ? run_command(command, argc - 2, argv + 2) : KVF__EXIT_USAGE;
}
