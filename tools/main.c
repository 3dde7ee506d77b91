/* kvfold: picks the command, reads its options, runs it. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tools/cli.h"
#include "tools/signals.h"

static const char help_head[] = "kvfold: language models on a paged KV cache that can compress itself.\n"
                                "\n"
                                "  kvfold run --prompt \"Why is the sky blue?\"\n"
                                "  kvfold run --input in.jsonl --output out.jsonl --rho 0.3 --compare full\n"
                                "\n"
                                "Commands:\n";

static const char help_tail[] = "  help        This text; help COMMAND, or help COMMAND OPTION, says more.\n"
                                "\n"
                                "Every command takes --help and --help-all. Without --model, the model that\n"
                                "scripts/fetch_model.sh fetched is used.\n"
                                "Exit status: 0 all went well, 1 some requests failed, 2 nothing was run (usage,\n"
                                "model, memory), 3 an output could not be written, 4 the engine failed,\n"
                                "130 interrupted.\n";

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

/* Whether a word behind a command's name names the part of it that has help of its own. */
static bool is_sub(const kvf__command *command, const char *word) {
    return command->sub && !strcmp(strrchr(command->sub->name, ' ') + 1, word);
}

static int help_command(int argc, char **argv) {
    if (argc == 0) return print_help();
    const kvf__command *command = find_command(argv[0]);
    if (!command) return KVF__EXIT_USAGE;
    if (argc > 1 && is_sub(command, argv[1])) {
        command = command->sub;
        argc--, argv++;
    }
    const char *topic = argc > 1 ? argv[1] : NULL;
    if (topic) (void)(kvf__args_asks(topic, &topic) || (topic = argv[1]));
    if (!kvf__args_help(command, topic)) {
        kvf__say("kvfold %s has no option %s", command->name, kvf__shown(argv[1]).text);
        return KVF__EXIT_USAGE;
    }
    return kvf__stdout_done() ? KVF__EXIT_OK : KVF__EXIT_OUTPUT;
}

/* Help that was asked for among the arguments of a command. */
static int help_among(const kvf__command *command, int argc, char **argv) {
    char *words[3] = {(char *)command->name};
    const char *topic;
    int n = 1;
    for (int i = 0; i < argc && n < 2; i++)
        if (is_sub(command, argv[i])) words[n++] = argv[i];
    for (int i = 0; i < argc; i++) {
        if (!kvf__args_asks(argv[i], &topic)) continue;
        if (topic) words[n++] = argv[i];
        break;
    }
    return help_command(n, words);
}

static int run_command(const kvf__command *command, int argc, char **argv) {
    kvf__cli cli = kvf__cli_default();
    kvf__args_result result = kvf__args_parse(command, argc, argv, &cli, cli.words, &cli.n_words, &cli.given);
    int code = KVF__EXIT_USAGE;
    if (result == KVF__ARGS_HELP)
        code = help_among(command, argc, argv);
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

/* A file that is opened must not get the number of a standard stream that was closed: text for that stream would go
 * into it. /dev/null the wrong way round takes the number, and using the stream fails as before. */
static void hold_standard_streams(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF) (void)open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

int main(int argc, char **argv) {
    hold_standard_streams();
    (void)signal(SIGXFSZ, SIG_IGN); /* a file that may not grow is a write that fails, as on a full disk */
    setlocale(LC_CTYPE, "");        /* for the chart: whether the terminal is UTF-8 */
    kvf__options_init();
    kvf__signals_guard_maps();
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
