/* Finding the step that answers a call. The steps that concern one call (a
 * function, device and keys) are sorted into its slot when it is first made.
 */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

/* Steps of one start and rank: answered in order, the last one staying. */
struct group {
    int64_t start_ns;
    int next, end;       /* which of the slot's steps */
    struct group *below; /* what holds once this group is used up */
};

struct slot {
    struct slot *next; /* of the same bucket */
    struct call call;
    int n_steps, n_groups, n_started;
    struct step **steps;
    struct group *groups, *top;
};

static bool concerns(const struct step *step, const struct call *call)
{
    int scope = functions[call->function].scope;
    if (step->function == ANY ? scope != SCOPE_DEVICE : step->function != call->function)
        return false;
    for (int i = 0; i < MAX_KEYS; i++)
        if (step->keys[i] != ANY && step->keys[i] != call->keys[i])
            return false;
    if (step->device == ANY) /* all GPUs, not their MIG devices */
        return call->device < MAX_GPUS;
    return scope == SCOPE_PROCESS || step->device == call->device;
}

static int by_time(const void *left, const void *right)
{
    const struct step *a = *(struct step *const *)left, *b = *(struct step *const *)right;
    if (a->start_ns != b->start_ns)
        return a->start_ns < b->start_ns ? -1 : 1;
    return a->rank != b->rank ? a->rank - b->rank : a->line - b->line;
}

static void fill(struct slot *slot, const struct table *table)
{
    slot->steps = need(calloc((size_t)table->n_steps + 1, sizeof *slot->steps));
    slot->groups = need(calloc((size_t)table->n_steps + 1, sizeof *slot->groups));
    for (int i = 0; i < table->n_steps; i++)
        if (concerns(table->steps[i], &slot->call))
            slot->steps[slot->n_steps++] = table->steps[i];
    qsort(slot->steps, (size_t)slot->n_steps, sizeof *slot->steps, by_time);
    for (int i = 0; i < slot->n_steps; i++) {
        const struct step *step = slot->steps[i], *last = i ? slot->steps[i - 1] : NULL;
        if (!last || step->start_ns != last->start_ns || step->rank != last->rank)
            slot->groups[slot->n_groups++] = (struct group){step->start_ns, i, i, NULL};
        slot->groups[slot->n_groups - 1].end = i + 1;
    }
}

static struct slot *slot_of(struct table *table, const struct call *call)
{
    uint64_t hash = (uint64_t)call->function * 31 + (uint64_t)call->device;
    for (int i = 0; i < MAX_KEYS; i++)
        hash = hash * 31 + (uint64_t)call->keys[i];
    struct slot **bucket = &table->slots[hash % N_BUCKETS];
    for (struct slot *slot = *bucket; slot; slot = slot->next)
        if (memcmp(&slot->call, call, sizeof *call) == 0)
            return slot;
    struct slot *slot = need(calloc(1, sizeof *slot));
    slot->call = *call;
    fill(slot, table);
    slot->next = *bucket;
    return *bucket = slot;
}

static bool used_up(const struct step *step, int device, bool last, int64_t now_ns)
{
    if (step->span_ns >= 0)
        return now_ns - step->start_ns >= step->span_ns;
    if (step->times < 0 && last)
        return false;
    return step->used[device] >= (step->times < 0 ? 1 : step->times);
}

const struct step *table_pick(struct table *table, const struct call *call, int64_t now_ns)
{
    struct slot *slot = slot_of(table, call);
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
            if (!used_up(step, call->device, group->next == group->end - 1, now_ns)) {
                step->used[call->device]++;
                return step;
            }
        }
    return NULL;
}

const struct step *table_past(struct table *table, const struct call *call, int64_t then_ns)
{
    struct slot *slot = slot_of(table, call);
    for (int i = slot->n_steps - 1; i >= 0; i--) {
        const struct step *step = slot->steps[i];
        bool over = step->span_ns >= 0 && then_ns - step->start_ns >= step->span_ns;
        if (step->ret == SUCCESS && step->start_ns <= then_ns && !over)
            return step;
    }
    return NULL;
}
