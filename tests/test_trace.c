/* Traces: every form is read as its columns say, made ones are what was asked for, and what is wrong is refused by line. */
#define _XOPEN_SOURCE 700
#include <criterion/criterion.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/trace.h"

static char path[64];

static void put_bytes(const char *text, size_t n) {
    snprintf(path, sizeof path, "%s", "kvf_trace_XXXXXX");
    int fd = mkstemp(path);
    cr_assert(fd >= 0 && write(fd, text, n) == (ssize_t)n);
    close(fd);
}

/* Reads text as a file; stderr goes to said. */
static bool read_text(const char *text, size_t n, uint64_t limit, kvf__trace *t, char *said, size_t capacity) {
    put_bytes(text, n);
    char err_path[] = "kvf_said_XXXXXX";
    int fd = mkstemp(err_path), old = dup(STDERR_FILENO);
    fflush(stderr);
    dup2(fd, STDERR_FILENO);
    bool good = kvf__trace_read(path, limit, t);
    fflush(stderr);
    dup2(old, STDERR_FILENO);
    close(old);
    ssize_t got = pread(fd, said, capacity - 1, 0);
    said[got > 0 ? got : 0] = '\0';
    close(fd);
    unlink(err_path);
    unlink(path);
    return good;
}

static kvf__trace good(const char *text) {
    kvf__trace t;
    char said[2000];
    cr_assert(read_text(text, strlen(text), 0, &t, said, sizeof said), "%s: %s", text, said);
    cr_assert_str_empty(said);
    return t;
}

static void is(const kvf__trace *t, uint64_t i, double arrival, uint32_t prompt, uint32_t output, uint32_t shared) {
    const kvf__trace_request *r = &t->requests[i];
    cr_assert(i < t->n && fabs(r->arrival_s - arrival) < 1e-9 && r->n_prompt == prompt && r->n_output == output &&
                  r->n_shared == shared,
              "request %llu: %.9f %u %u %u", (unsigned long long)i, r->arrival_s, r->n_prompt, r->n_output,
              r->n_shared);
}

Test(trace, own_form) {
    kvf__trace t = good("kvfold-trace 1\n"
                        "arrival_s prompt_tokens output_tokens prefix_group shared_tokens density\n"
                        "# two of one group\n"
                        "0 100 10 a 0 0.5,0.25,1e-3\n"
                        "\n"
                        "0.5\t80 0  a 64 -\n"
                        "0.5 7 3 - 0 0,0,0\r\n"
                        "2.25 9 1 b 0 -\n");
    cr_assert(t.n == 4 && t.n_groups == 2 && t.n_layers == 3 && t.n_densities == 2 && !strcmp(t.form, "kvfold"));
    is(&t, 0, 0, 100, 10, 0);
    is(&t, 1, 0.5, 80, 0, 64);
    is(&t, 2, 0.5, 7, 3, 0);
    is(&t, 3, 2.25, 9, 1, 0);
    cr_assert(t.requests[0].group == t.requests[1].group && t.requests[3].group == 1 &&
              t.requests[2].group == KVF__TRACE_NONE);
    cr_assert(t.requests[1].density == KVF__TRACE_NONE && t.densities[1] == 0.25 && t.densities[2] == 1e-3);
    kvf__trace_free(&t);
    t = good("kvfold-trace 1\nshared_tokens prefix_group output_tokens prompt_tokens arrival_s\n0 - 3 5 1.5\n");
    is(&t, 0, 1.5, 5, 3, 0); /* the columns' order is the second line's */
    cr_assert_eq(t.n_layers, 0);
    kvf__trace_free(&t);
}

Test(trace, azure_tables) {
    kvf__trace t = good("TIMESTAMP,ContextTokens,GeneratedTokens\n"
                        "2023-11-16 18:17:03.9799600,4808,10\n"
                        "2023-11-16 18:17:04.0319600,3180,8\n"
                        "2023-12-01 00:00:00.0000000,110,27");
    cr_assert(t.n == 3 && !strcmp(t.form, "azure"));
    is(&t, 0, 0, 4808, 10, 0);
    cr_assert_float_eq(t.requests[1].arrival_s, 0.052, 1e-9);
    cr_assert_float_eq(t.requests[2].arrival_s, 14 * 86400 + 5 * 3600 + 42 * 60 + 56.02004, 1e-6);
    kvf__trace_free(&t);
    t = good("TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
             "2024-02-28 23:59:59.500000+00:00,10,1\r\n"
             "2024-02-29T01:00:00.250000+01:00,11,2\r\n"
             "2024-03-01 00:00:00Z,12,3\r\n");
    is(&t, 1, 0.75, 11, 2, 0); /* the offset counts, and so does the leap day */
    is(&t, 2, 86400.5, 12, 3, 0);
    kvf__trace_free(&t);
}

Test(trace, burstgpt_tables) {
    kvf__trace t = good("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
                        "5,ChatGPT,472,18,490,Conversation log\n"
                        "45.5,ChatGPT,1087,0,1087,Conversation log\n"
                        "118,GPT-4,417,276,693,\"API, log\"\n");
    cr_assert(t.n == 2 && t.n_skipped == 1 && !strcmp(t.form, "burstgpt"));
    is(&t, 0, 0, 472, 18, 0);
    is(&t, 1, 113, 417, 276, 0);
    kvf__trace_free(&t);
    t = good("Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
             "0,\"a,b\",1,GPT-4,100.0,10,110,Conversation log\n");
    is(&t, 0, 0, 100, 10, 0); /* columns are found by name; a comma in quotes is none */
    kvf__trace_free(&t);
}

Test(trace, mooncake_lines) {
    kvf__trace t =
        good("{\"timestamp\": 27000, \"input_length\": 6955, \"output_length\": 52, \"hash_ids\": [46, 47, 48]}\n"
             "{\"timestamp\": 30000, \"input_length\": 1500, \"output_length\": 26, \"hash_ids\": [46.0, 47, 2353e0]}\n"
             "{\"timestamp\": 30500, \"input_length\": 600, \"output_length\": 1, \"hash_ids\": [46, 2353]}\n"
             "{\"timestamp\": 31000, \"input_length\": 500, \"output_length\": 1, \"hash_ids\": [46]}\n"
             "{\"timestamp\": 31000, \"input_length\": 9, \"output_length\": 1}\n");
    cr_assert(t.n == 5 && !strcmp(t.form, "mooncake"));
    is(&t, 0, 0, 6955, 52, 0);
    is(&t, 1, 3, 1500, 26, 1024);
    is(&t, 2, 3.5, 600, 1, 600); /* both its blocks were seen */
    is(&t, 3, 4, 500, 1, 500);   /* no more than the prompt */
    is(&t, 4, 4, 9, 1, 0);
    cr_assert(t.requests[4].group == KVF__TRACE_NONE && t.requests[0].group == t.requests[3].group);
    kvf__trace_free(&t);
}

#define HEAD "kvfold-trace 1\narrival_s prompt_tokens output_tokens prefix_group shared_tokens density\n"

Test(trace, what_is_wrong_is_named_by_file_line_and_value) {
    static const struct {
        const char *text, *said;
    } cases[] = {
        {"", "the file is empty"},
        {"hello\n", "line 1: hello: is no trace: it begins with"},
        {"kvfold-trace 2\n", "line 1: kvfold-trace 2: this kvfold reads version 1"},
        {"kvfold-trace 1\n", "ends before the line of the columns"},
        {HEAD, "there is no request"},
        {"kvfold-trace 1\narrival_s prompt_tokens prefix_group shared_tokens\n",
         "line 2: column output_tokens is missing"},
        {"kvfold-trace 1\narrival_s speed\n", "line 2: column speed: is none of"},
        {"kvfold-trace 1\narrival_s arrival_s\n", "line 2: column arrival_s: stands there twice"},
        {HEAD "1 5 5 - 0 -\n0.5 5 5 - 0 -\n", "line 4: the clock goes back: arrival 0.500000 s after 1.000000 s: sort"},
        {HEAD "0 -5 5 - 0 -\n", "line 3: prompt_tokens -5: must be a whole number from 1 to 1073741824"},
        {HEAD "0 0 5 - 0 -\n", "prompt_tokens 0: must be"},
        {HEAD "0 5 1.5 - 0 -\n", "output_tokens 1.5: must be a whole number"},
        {HEAD "0 5 99999999999 - 0 -\n", "output_tokens 99999999999: must be"},
        {HEAD "-1 5 5 - 0 -\n", "arrival_s -1: must be a time of 0 or more"},
        {HEAD "nan 5 5 - 0 -\n", "arrival_s nan: must be"},
        {HEAD "0 5 5 - 0\n", "line 3: has 5 columns, the second line names 6"},
        {HEAD "0 5 5 - 0 - 7\n", "line 3: has 7 columns"},
        {HEAD "0 5 5 a 6 -\n", "shared_tokens 6: must be at most prompt_tokens 5"},
        {HEAD "0 5 5 - 1 -\n", "shared_tokens 1: there is no prefix_group"},
        {HEAD "0 5 5 - 0 0.5,x\n", "density of layer 1, x: must be a number"},
        {HEAD "0 5 5 - 0 0.5,-1\n", "density of layer 1, -1: must be"},
        {HEAD "0 5 5 - 0 0.5,1\n1 5 5 - 0 0.5\n", "line 4: density: has 1 values, earlier lines have 2"},
        {HEAD "0 5 5 - 0 -\n0 5 5 - 0 ", "line 4: has no line end: the file was cut off here"},
        {"TIMESTAMP,ContextTokens\n", "line 1: column GeneratedTokens is missing"},
        {"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,48\n",
         "line 2: GeneratedTokens is missing: the line"},
        {"TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,48,1\n", "line 2: TIMESTAMP yesterday: must be a date"},
        {"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-13-16 18:17:03,48,1\n",
         "TIMESTAMP '2023-13-16 18:17:03': must be"},
        {"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,-4,1\n", "ContextTokens -4: must be"},
        {"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4,1\n2023-11-16 18:17:02,4,1\n",
         "line 3: the clock goes back: arrival -1.000000 s"},
        {"Timestamp,Model,Request tokens\n", "line 1: column Response tokens is missing"},
        {"Timestamp,Request tokens,Response tokens\n1,2,x\n", "line 2: Response tokens x: must be"},
        {"{\"timestamp\": 1, \"input_length\": 5}\n", "line 1: output_length is missing"},
        {"{\"input_length\": 5, \"output_length\": 1}\n", "line 1: timestamp is missing"},
        {"{\"timestamp\": 1, \"input_length\": \"5\", \"output_length\": 1}\n",
         "input_length 'of another type': must be"},
        {"{\"timestamp\": 1, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": [1, -2]}\n",
         "hash_ids[1]: must be"},
        {"{\"timestamp\": 1, \"input_length\": 5, \"output_length\": 1}\n{\"timestamp\": 2, \"inp",
         "line 2: is no JSON object"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvf__trace t;
        char said[2000];
        bool read = read_text(cases[i].text, strlen(cases[i].text), 0, &t, said, sizeof said);
        cr_expect(!read && strstr(said, cases[i].said) && strstr(said, "kvf_trace_") && !t.requests,
                  "case %zu: %s, said: %s", i, cases[i].said, said);
        if (read) kvf__trace_free(&t);
    }
}

Test(trace, zero_bytes_and_endless_lines_are_refused) {
    kvf__trace t;
    char said[2000];
    static const char zero[] = HEAD "0 5 5 - 0 -\0\n";
    cr_assert(!read_text(zero, sizeof zero - 1, 0, &t, said, sizeof said) && strstr(said, "holds a zero byte"), "%s",
              said);
    size_t n = 3 << 20;
    char *endless = malloc(n);
    memset(endless, '7', n);
    memcpy(endless, HEAD, strlen(HEAD));
    cr_assert(!read_text(endless, n, 0, &t, said, sizeof said) && strstr(said, "line 3: is longer than 1048576 bytes"),
              "%s", said);
    free(endless);
    cr_assert(read_text(HEAD "0 5 5 - 0 -\n1 6 5 - 0 -\nbroken\n", strlen(HEAD) + 31, 2, &t, said, sizeof said) &&
                  t.n == 2,
              "%s", said); /* a limit: what comes after is not looked at */
    kvf__trace_free(&t);
}

static const kvf__trace_make make = {.n_requests = 20000,
                                     .seed = 7,
                                     .rate = 5,
                                     .burst = 10,
                                     .prompt_mean = 400,
                                     .prompt_sigma = 0.7,
                                     .output_mean = 90,
                                     .output_sigma = 0.5,
                                     .n_groups = 4,
                                     .shared_tokens = 64,
                                     .prompt_max = 1 << 20,
                                     .output_max = 1 << 20,
                                     .grouped = 0.25};

static double mean(const kvf__trace *t, int what) {
    double sum = 0;
    for (uint64_t i = 0; i < t->n; i++) {
        const kvf__trace_request *r = &t->requests[i];
        sum += what == 0   ? r->n_prompt - (r->group == KVF__TRACE_NONE ? 0 : 64.0)
               : what == 1 ? r->n_output
                           : r->n_shared > 0;
    }
    return sum / (double)t->n;
}

Test(trace, made_traces_have_the_means_asked_for) {
    for (int bursty = 0; bursty < 2; bursty++) {
        kvf__trace t, again;
        kvf__trace_make m = make;
        m.bursty = bursty;
        cr_assert(kvf__trace_generate(&m, &t) && kvf__trace_generate(&m, &again) && t.n == 20000);
        cr_assert(!memcmp(t.requests, again.requests, t.n * sizeof *t.requests), "one seed, two traces");
        double rate = (double)t.n / t.requests[t.n - 1].arrival_s, together = 0;
        cr_assert(fabs(rate / 5 - 1) < (bursty ? 0.08 : 0.03), "rate %.3f", rate);
        cr_assert(fabs(mean(&t, 0) / 400 - 1) < 0.03 && fabs(mean(&t, 1) / 90 - 1) < 0.03, "%.1f, %.1f", mean(&t, 0),
                  mean(&t, 1));
        cr_assert(fabs(mean(&t, 2) - 0.25) < 0.02);
        for (uint64_t i = 1; i < t.n; i++) {
            cr_assert(t.requests[i].arrival_s >= t.requests[i - 1].arrival_s);
            together += t.requests[i].arrival_s == t.requests[i - 1].arrival_s;
        }
        if (bursty) /* all but the first of each burst of 10 */
            cr_assert(fabs(together / (double)t.n - 0.9) < 0.03, "%.3f come together", together / (double)t.n);
        else
            cr_assert_eq(together, 0);
        m.seed++;
        kvf__trace_free(&again);
        cr_assert(kvf__trace_generate(&m, &again) && memcmp(t.requests, again.requests, t.n * sizeof *t.requests) != 0);
        kvf__trace_free(&t);
        kvf__trace_free(&again);
    }
}

Test(trace, written_ones_are_read_back) {
    kvf__trace t, back;
    kvf__trace_make m = make;
    m.n_requests = 300;
    cr_assert(kvf__trace_generate(&m, &t));
    t.n_layers = 2;
    const double f[2] = {0.125, 0.75};
    cr_assert(kvf__trace_add(&t, t.requests[299], f));
    char file[] = "kvf_made_XXXXXX";
    close(mkstemp(file));
    cr_assert(kvf__trace_write(file, &t) && kvf__trace_read(file, 0, &back) && back.n == t.n && back.n_layers == 2);
    for (uint64_t i = 0; i < t.n; i++) {
        const kvf__trace_request *a = &t.requests[i], *b = &back.requests[i];
        cr_assert(fabs(a->arrival_s - b->arrival_s) < 1e-6 && a->n_prompt == b->n_prompt &&
                  a->n_output == b->n_output && a->n_shared == b->n_shared &&
                  (a->group == KVF__TRACE_NONE) == (b->group == KVF__TRACE_NONE));
    }
    cr_assert(back.requests[300].density == 0 && !memcmp(back.densities, f, sizeof f));
    unlink(file);
    kvf__trace_free(&t);
    kvf__trace_free(&back);
}
