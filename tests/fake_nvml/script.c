/* Reading the script's lines, and finding the step that answers a call.
 *
 * The lines, written by __init__.py (times in ns, whole numbers):
 *   nvml-lines 1
 *   epoch MONOTONIC_NS
 *   device UUID DOMAIN:BUS:SLOT.FUNCTION MINOR NAME
 *   step START FN DEV|* RET SIGNAL TAKES TIMES SPAN VALUE...
 * where RET is an nvmlReturn_t or -1 for a crash, and VALUE... is nothing
 * (the default), numbers, or a double quote and the text up to the line's end.
 */
#include "fake.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Steps of one start and rank: answered in order, the last one staying. */
struct group {
    int64_t start_ns;
    int next, end;       /* which of the slot's steps */
    struct group *below; /* what holds once this group is used up */
};

struct slot {
    int n_steps, n_groups, n_started;
    struct step **steps;
    struct group *groups, *top;
};

const struct function_info functions[FN_COUNT] = {
#define PROCESS(fn, ...) {#fn, SCOPE_PROCESS, NULL, {__VA_ARGS__}},
#define PROCESS_TEXT(fn, text) {#fn, SCOPE_PROCESS, text, {0}},
#define DEVICE(fn, ...) {#fn, SCOPE_DEVICE, NULL, {__VA_ARGS__}},
#define DEVICE_UINT(fn, value) {#fn, SCOPE_DEVICE, NULL, {value}},
#define DEVICE_UINT_OF(fn, value) {#fn, SCOPE_DEVICE, NULL, {value}},
#define DEVICE_ULL(fn, value) {#fn, SCOPE_DEVICE, NULL, {value}},
#define DEVICE_TEXT(fn, text) {#fn, SCOPE_DEVICE, text, {0}},
#define DEVICE_KEY(fn, key, value) {#fn ":" #key, SCOPE_DEVICE, NULL, {value}},
#define EVENT(name) {#name, SCOPE_EVENT, NULL, {0}},
#define FIELD(id, type, value)
#include "functions.def"
#include "undef.h"
};

static void *need(void *memory)
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

static bool unsigned64(const char *word, uint64_t *out)
{
    char *end;
    errno = 0;
    *out = strtoull(word, &end, 10);
    return *word >= '0' && *word <= '9' && !errno && !*end;
}

static int find_device(const char *word, int n_devices)
{
    int64_t device;
    if (word && strcmp(word, "*") == 0)
        return -1;
    return integer(word, 0, n_devices - 1, &device) ? (int)device : -2;
}

/* "FN" is the call of that name or, if there is none, all of its "FN:key". */
static bool find_function(const char *word, struct step *step)
{
    static const char fields[] = "nvmlDeviceGetFieldValues:";
    int64_t field;
    size_t length;
    if (!word)
        return false;
    step->function = -1;
    step->n_functions = 0;
    if (strcmp(word, "any") == 0)
        return true;
    step->rank = 2;
    if (strncmp(word, fields, sizeof fields - 1) == 0) {
        if (!integer(word + sizeof fields - 1, 0, MAX_FIELDS - 1, &field))
            return false;
        step->function = FN_COUNT + (int)field;
        step->n_functions = 1;
        return true;
    }
    length = strlen(word);
    for (int i = 0; i < FN_COUNT; i++) {
        const char *name = functions[i].name;
        if (strncmp(name, word, length) != 0 || (name[length] && name[length] != ':'))
            continue;
        if (step->n_functions++ == 0)
            step->function = i;
        if (name[length] == ':')
            step->rank = 1;
    }
    return step->n_functions > 0;
}

static const char *read_device(struct table *table, char *rest)
{
    const char *uuid = strsep(&rest, " "), *pci = strsep(&rest, " "), *minor = strsep(&rest, " ");
    int64_t number;
    int length = -1;
    if (table->n_devices == MAX_DEVICES)
        return "too many devices";
    if (table->n_steps)
        return "a device after a step";
    struct device *device = &table->devices[table->n_devices];
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
    table->n_devices++;
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
    while ((word = strsep(&rest, " ")))
        if (!unsigned64(word, &step->values[step->n_values++]))
            return "bad value";
    return NULL;
}

static void free_step(struct step *step)
{
    free(step->values);
    free(step->text);
    free(step->used);
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
    else if ((step->device = find_device(strsep(&rest, " "), table->n_devices)) == -2)
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
    step->rank += step->device >= 0 ? 3 : 0;
    step->used = need(calloc((size_t)table->n_devices + 1, sizeof *step->used));
    if ((table->n_steps & (table->n_steps - 1)) == 0) /* grow at powers of two */
        table->steps = need(realloc(table->steps, sizeof *table->steps
                                                      * (size_t)(2 * table->n_steps + 1)));
    table->steps[table->n_steps++] = step;
    return NULL;
}

static struct slot *slot_of(struct table *table, int function, int device)
{
    return &table->slots[function * (table->n_devices ? table->n_devices : 1) + device];
}

/* Call visit for each slot that the step answers in. */
static void each_slot(struct table *table, struct step *step,
                      void (*visit)(struct slot *, struct step *))
{
    int first = step->function < 0 ? 0 : step->function;
    int end = step->function < 0 ? FN_COUNT : first + step->n_functions;
    for (int fn = first; fn < end; fn++) {
        bool process = fn < FN_COUNT && functions[fn].scope == SCOPE_PROCESS;
        if (step->function < 0 && functions[fn].scope != SCOPE_DEVICE)
            continue;
        int low = step->device < 0 ? 0 : step->device;
        int high = process ? 1 : step->device < 0 ? table->n_devices : low + 1;
        for (int device = low; device < high; device++)
            visit(slot_of(table, fn, device), step);
    }
}

static void count_step(struct slot *slot, struct step *step)
{
    (void)step;
    slot->n_steps++;
}

static void put_step(struct slot *slot, struct step *step)
{
    slot->steps[slot->n_groups++] = step; /* n_groups counts steps until they are grouped */
}

static int by_time(const void *left, const void *right)
{
    const struct step *a = *(struct step *const *)left, *b = *(struct step *const *)right;
    if (a->start_ns != b->start_ns)
        return a->start_ns < b->start_ns ? -1 : 1;
    return a->rank != b->rank ? a->rank - b->rank : a->line - b->line;
}

static void group_steps(struct slot *slot)
{
    qsort(slot->steps, (size_t)slot->n_steps, sizeof *slot->steps, by_time);
    slot->groups = need(calloc((size_t)slot->n_steps, sizeof *slot->groups));
    slot->n_groups = 0;
    for (int i = 0; i < slot->n_steps; i++) {
        struct step *step = slot->steps[i];
        if (i == 0 || step->start_ns != slot->steps[i - 1]->start_ns
            || step->rank != slot->steps[i - 1]->rank)
            slot->groups[slot->n_groups++] = (struct group){step->start_ns, i, i, NULL};
        slot->groups[slot->n_groups - 1].end = i + 1;
    }
}

static void fill_slots(struct table *table)
{
    size_t n_slots = (size_t)((FN_COUNT + MAX_FIELDS) * (table->n_devices ? table->n_devices : 1));
    table->slots = need(calloc(n_slots, sizeof *table->slots));
    for (int i = 0; i < table->n_steps; i++)
        each_slot(table, table->steps[i], count_step);
    for (size_t i = 0; i < n_slots; i++)
        if (table->slots[i].n_steps)
            table->slots[i].steps = need(calloc((size_t)table->slots[i].n_steps,
                                                sizeof(struct step *)));
    for (int i = 0; i < table->n_steps; i++)
        each_slot(table, table->steps[i], put_step);
    for (size_t i = 0; i < n_slots; i++)
        if (table->slots[i].n_steps)
            group_steps(&table->slots[i]);
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
    int n = table->n_devices < older->n_devices ? table->n_devices : older->n_devices;
    for (int i = 0; i < table->n_steps && i < older->n_steps
                    && table->steps[i]->hash == older->steps[i]->hash; i++)
        memcpy(table->steps[i]->used, older->steps[i]->used,
               ((size_t)n + 1) * sizeof *table->steps[i]->used);
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
    fill_slots(table);
    table->older = older;
    return table;
}

static bool used_up(const struct step *step, int device, bool last, int64_t now_ns)
{
    if (step->span_ns >= 0)
        return now_ns - step->start_ns >= step->span_ns;
    if (step->times < 0 && last)
        return false;
    return step->used[device] >= (step->times < 0 ? 1 : step->times);
}

const struct step *table_pick(struct table *table, int function, int device, int64_t now_ns)
{
    struct slot *slot = slot_of(table, function, device);
    while (slot->n_started < slot->n_groups
           && slot->groups[slot->n_started].start_ns <= now_ns) {
        struct group *group = &slot->groups[slot->n_started++];
        group->below = slot->top;
        slot->top = group;
    }
    /* What is used up stays so: drop it, and no call looks at it again. */
    for (; slot->top; slot->top = slot->top->below)
        for (struct group *group = slot->top; group->next < group->end; group->next++) {
            struct step *step = slot->steps[group->next];
            if (!used_up(step, device, group->next == group->end - 1, now_ns)) {
                step->used[device]++;
                return step;
            }
        }
    return NULL;
}
