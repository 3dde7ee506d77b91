/* tools/calibrate/texts.h: the prompts that a probe is fitted to. */
#ifndef KVF_TOOLS_CALIBRATE_TEXTS_H
#define KVF_TOOLS_CALIBRATE_TEXTS_H

#include "tools/cli.h"

typedef struct kvf__calibration { /* zero: empty */
    uint32_t *tokens;             /* [n][context] */
    uint32_t n, context;
} kvf__calibration;

/* Prompts of equal length: places of the texts that --text names, or of those that the command carries (prose, code),
 * half of them with made-up facts in between; and lists of nothing but such facts. False after a message. */
bool kvf__calibration_make(const kvf__cli *cli, const kvf_tokenizer *tokenizer, uint32_t n, uint32_t context,
                           kvf__calibration *out);
void kvf__calibration_free(kvf__calibration *prompts);

#endif
