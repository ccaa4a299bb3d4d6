/* Which devices are there at a time, and at which index. */
#include "fake.h"

static void add(const struct table *table, int parent, uint64_t device, struct roster *out)
{
    if (device < MAX_DEVICES && table_has(table, (int)device)
        && table->devices[device].parent == parent && roster_index(out, (int)device) == ANY)
        out->devices[out->n++] = (int)device;
}

void table_roster(struct table *table, int parent, int64_t now_ns, struct roster *out)
{
    bool gpus = parent == ANY;
    const struct call call = {gpus ? FN_devices : FN_mig, gpus ? 0 : parent, {0}};
    const struct step *step = table_pick(table, &call, now_ns);
    out->scripted = step && step->listed;
    out->n = 0;
    for (int i = 0; out->scripted && i < step->n_values; i++)
        add(table, parent, step->values[i].start, out);
    for (int i = 0; gpus && !out->scripted && i < table->n_gpus; i++)
        add(table, parent, (uint64_t)i, out);
}

int roster_index(const struct roster *roster, int device)
{
    for (int i = 0; i < roster->n; i++)
        if (roster->devices[i] == device)
            return i;
    return ANY;
}
