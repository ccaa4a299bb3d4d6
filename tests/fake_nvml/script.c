/* Reading the script's lines.
 *
 * The lines, written by lines.py (times in ns, whole numbers):
 *   nvml-lines 1
 *   epoch MONOTONIC_NS
 *   device UUID DOMAIN:BUS:SLOT.FUNCTION MINOR NAME
 *   mig UUID PARENT GPU_INSTANCE COMPUTE_INSTANCE SLICES MEMORY_MIB NAME
 *   step START FN[:KEY...] DEV|* RET SIGNAL TAKES TIMES SPAN VALUE...
 * where KEY is a number or * for any, RET is an nvmlReturn_t or -1 for a crash,
 * and VALUE... is nothing (the default), a double quote and the text up to the
 * line's end, or numbers, after a [ if they are a list. A number is N, a dot for
 * the default, or a rate, START+PER_SECOND%WRAP; no START is what it was before.
 */
#include "fake.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const struct function_info functions[FN_COUNT] = {
#define ENTRY(id, name, scope, text, per_second, n, m, l, ...) \
    {name, scope, text, per_second, {n, m, l},                 \
     sizeof((uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t), {__VA_ARGS__}},
#include "functions.h"
};

void *need(void *memory)
{
    if (!memory)
        abort();
    return memory;
}

static bool integer(const char *word, int64_t low, int64_t high, int64_t *out)
{
    char *end;
    errno = 0;
    long long number = word && *word ? strtoll(word, &end, 10) : (end = "?", 0);
    *out = number;
    return !errno && !*end && number >= low && number <= high;
}

static bool unsigned64(const char *word, char **end, uint64_t *out)
{
    errno = 0;
    *out = strtoull(word, end, 10);
    return *word >= '0' && *word <= '9' && !errno;
}

static bool read_number(const char *word, struct number *number)
{
    char *end;
    if (strcmp(word, ".") == 0)
        return true;
    number->given = true;
    number->goes_on = *word == '+';
    end = (char *)word;
    if (!number->goes_on && !unsigned64(word, &end, &number->start))
        return false;
    if (!*end)
        return true;
    number->per_second = *end == '+' ? strtod(end + 1, &end) : 0;
    return *end == '%' && unsigned64(end + 1, &end, &number->wrap) && !*end;
}

bool table_has(const struct table *table, int device)
{
    int nth = device < MAX_GPUS ? device : device - MAX_GPUS;
    return nth >= 0 && nth < (device < MAX_GPUS ? table->n_gpus : table->n_migs);
}

static int find_device(const struct table *table, const char *word)
{
    int64_t device;
    if (word && strcmp(word, "*") == 0)
        return ANY;
    return integer(word, 0, MAX_DEVICES - 1, &device) && table_has(table, (int)device)
               ? (int)device : -2;
}

/* A more specific step of the same time wins: any < function < its keys. */
static bool find_function(char *word, struct step *step)
{
    const char *name = strsep(&word, ":"), *key;
    for (int i = 0; i < MAX_KEYS; i++)
        step->keys[i] = ANY;
    step->function = ANY;
    if (!name || strcmp(name, "any") == 0)
        return name && !word;
    for (step->function = 0; strcmp(functions[step->function].name, name) != 0;)
        if (++step->function == FN_COUNT)
            return false;
    step->rank = 1;
    for (int i = 0; (key = strsep(&word, ":")); i++) {
        if (i == MAX_KEYS)
            return false;
        if (strcmp(key, "*") == 0)
            continue;
        if (!integer(key, 0, UINT32_MAX, &step->keys[i]))
            return false;
        step->rank++;
    }
    return true;
}

static const char *read_device(struct table *table, char *rest)
{
    const char *uuid = strsep(&rest, " "), *pci = strsep(&rest, " "), *minor = strsep(&rest, " ");
    int64_t number;
    int length = -1;
    if (table->n_gpus == MAX_GPUS)
        return "too many devices";
    if (table->n_steps)
        return "a device after a step";
    struct device *device = &table->devices[table->n_gpus];
    if (!rest || strlen(uuid) >= sizeof device->uuid || strlen(rest) >= sizeof device->name)
        return "device needs UUID PCI MINOR NAME, not too long";
    if (sscanf(pci, "%8x:%2x:%2x.%1x%n", &device->domain, &device->bus, &device->slot,
               &device->pci_function, &length) != 4 || pci[length])
        return "bad PCI address";
    if (!integer(minor, 0, INT_MAX, &number))
        return "bad minor number";
    device->minor = (unsigned)number;
    strcpy(device->uuid, uuid);
    strcpy(device->name, rest);
    device->parent = ANY;
    table->n_gpus++;
    return NULL;
}

static const char *read_mig(struct table *table, char *rest)
{
    const char *uuid = strsep(&rest, " ");
    int64_t numbers[5];
    if (table->n_migs == MAX_DEVICES - MAX_GPUS)
        return "too many MIG devices";
    struct device *device = &table->devices[MAX_GPUS + table->n_migs];
    for (int i = 0; i < 5; i++)
        if (!integer(strsep(&rest, " "), 0, i ? INT_MAX : table->n_gpus - 1, &numbers[i]))
            return "mig needs UUID PARENT and four numbers";
    if (!rest || strlen(uuid) >= sizeof device->uuid || strlen(rest) >= sizeof device->name)
        return "mig needs a UUID and a NAME, not too long";
    *device = table->devices[numbers[0]];
    device->parent = (int)numbers[0];
    device->gpu_instance = (unsigned)numbers[1];
    device->compute_instance = (unsigned)numbers[2];
    device->slices = (unsigned)numbers[3];
    device->memory_mib = (uint64_t)numbers[4];
    strcpy(device->uuid, uuid);
    strcpy(device->name, rest);
    table->n_migs++;
    return NULL;
}

static const char *read_values(struct step *step, char *rest)
{
    char *word;
    if (rest && *rest == '"') {
        step->text = need(strdup(rest + 1));
        return NULL;
    }
    step->values = need(calloc(rest ? strlen(rest) / 2 + 1 : 1, sizeof *step->values));
    if (rest && *rest == '[') {
        step->listed = true;
        strsep(&rest, " ");
    }
    while ((word = strsep(&rest, " ")))
        if (!read_number(word, &step->values[step->n_values++]))
            return "bad value";
    return NULL;
}

static void free_step(struct step *step)
{
    free(step->values);
    free(step->text);
    free(step);
}

static const char *read_step(struct table *table, char *rest, int line)
{
    struct step *step = need(calloc(1, sizeof *step));
    const char *what = NULL;
    int64_t ret, signal;
    step->line = line;
    step->hash = 14695981039346656037u;
    for (const char *at = rest; at && *at; at++)
        step->hash = (step->hash ^ (unsigned char)*at) * 1099511628211u;
    if (!integer(strsep(&rest, " "), 0, INT64_MAX, &step->start_ns))
        what = "bad start";
    else if (!find_function(strsep(&rest, " "), step))
        what = "unknown function";
    else if ((step->device = find_device(table, strsep(&rest, " "))) == -2)
        what = "no such device";
    else if (!integer(strsep(&rest, " "), CRASH, 999, &ret))
        what = "bad return code";
    else if (!integer(strsep(&rest, " "), 0, 64, &signal) || (ret == CRASH && signal == 0))
        what = "bad signal";
    else if (!integer(strsep(&rest, " "), -1, INT64_MAX, &step->takes_ns))
        what = "bad delay";
    else if (!integer(strsep(&rest, " "), -1, INT64_MAX, &step->times))
        what = "bad number of times";
    else if (!integer(strsep(&rest, " "), -1, INT64_MAX, &step->span_ns))
        what = "bad span";
    else
        what = read_values(step, rest);
    if (what) {
        free_step(step);
        return what;
    }
    step->ret = (int)ret;
    step->signal = (int)signal;
    /* A device named counts for more than a function named: a step that takes
     * one GPU off the bus beats a value given to all of the same time. */
    step->rank += step->device >= 0 ? MAX_KEYS + 2 : 0;
    if ((table->n_steps & (table->n_steps - 1)) == 0) /* grow at powers of two */
        table->steps = need(realloc(table->steps, sizeof *table->steps
                                                      * (size_t)(2 * table->n_steps + 1)));
    table->steps[table->n_steps++] = step;
    return NULL;
}

static const char *read_line(struct table *table, char *line, size_t length, int number)
{
    char *rest = line;
    if (strlen(line) != length)
        return "NUL byte";
    if (number == 1)
        return strcmp(line, "nvml-lines 1") == 0 ? NULL : "not a script of format nvml-lines 1";
    const char *word = strsep(&rest, " ");
    if (strcmp(word, "epoch") == 0)
        return integer(rest, 0, INT64_MAX, &table->epoch_ns) ? NULL : "bad epoch";
    if (strcmp(word, "device") == 0)
        return read_device(table, rest);
    if (strcmp(word, "mig") == 0)
        return read_mig(table, rest);
    if (strcmp(word, "step") == 0)
        return read_step(table, rest, number);
    return "unknown kind of line";
}

static void free_table(struct table *table)
{
    for (int i = 0; i < table->n_steps; i++)
        free_step(table->steps[i]);
    free(table->steps);
    free(table);
}

static void keep_counts(struct table *table, const struct table *older)
{
    for (int i = 0; i < table->n_steps && i < older->n_steps
                    && table->steps[i]->hash == older->steps[i]->hash; i++)
        memcpy(table->steps[i]->used, older->steps[i]->used, sizeof older->steps[i]->used);
}

struct table *table_load(const char *path, struct table *older)
{
    struct table *table = need(calloc(1, sizeof *table));
    const char *what = NULL;
    char *line = NULL;
    size_t room = 0;
    ssize_t length;
    int number = 0;
    FILE *file = fopen(path, "re");
    if (!file)
        what = strerror(errno);
    while (!what && (length = getline(&line, &room, file)) >= 0) {
        if (line[length - 1] == '\n')
            line[--length] = '\0';
        what = read_line(table, line, (size_t)length, ++number);
    }
    if (!what && number == 0)
        what = "empty script";
    free(line);
    if (file)
        fclose(file);
    if (what) {
        fprintf(stderr, "fake nvml: %s:%d: %s\n", path, number, what);
        free_table(table);
        return NULL;
    }
    if (older)
        keep_counts(table, older);
    table->older = older;
    return table;
}
