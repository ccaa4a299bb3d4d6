/* Field values and the driver's own record of samples. */
#include "fake.h"

#include <string.h>

enum { MAX_FIELDS = 512, RING_NS = 20000000, RING_POINTS = 119, SLOW_NS = 200000000 };
static const int64_t ALL_LINKS = 0xffffffff;

/* Structures of the real nvml.h, under names of our own. */
struct field {
    unsigned id, scope;
    long long timestamp_us, latency_us;
    unsigned type;
    int ret;
    unsigned long long value;
};
struct sample { unsigned long long timestamp_us, value; };

/* Which fields are supported by default. GPU: the scope says nothing; LINK: it
 * is a link; LINKS: and the sum of all if it is ALL_LINKS. */
static const struct {
    enum value_type type;
    enum { NONE, GPU, LINK, LINKS } scope;
    int64_t start;
    double per_second;
} defaults[MAX_FIELDS] = {
#define FIELD(id, type, scope, start, per_second) [id] = {type, scope, start, per_second},
#include "functions.h"
};

uint64_t default_field(int64_t id, int64_t link, int64_t now_ns)
{
    int scope = id < MAX_FIELDS ? defaults[id].scope : NONE;
    if (scope == NONE || (scope != GPU && link >= N_LINKS && link != ALL_LINKS))
        return UNSUPPORTED;
    uint64_t number = advance((uint64_t)defaults[id].start, defaults[id].per_second, now_ns);
    return scope == LINKS && link == ALL_LINKS ? N_LINKS * number : number;
}

static void get_field(int device, struct field *out)
{
    static const size_t sizes[] = {8, 4, 8, 8, 8, 4, 2}; /* by nvmlValueType_t */
    const struct call *call = CALL(FN_field, device, out->id, out->scope);
    struct reply reply;
    uint64_t bits;
    out->type = ULONGLONG;
    out->value = 0;
    out->ret = answer(call, &reply);
    if (out->ret == SUCCESS && (bits = value(call, &reply, 0)) == UNSUPPORTED)
        out->ret = NOT_SUPPORTED;
    if (out->ret != SUCCESS)
        return;
    if (reply.step && reply.step->n_values > 1)
        out->type = (unsigned)value(call, &reply, 1);
    else if (out->id < MAX_FIELDS && defaults[out->id].scope)
        out->type = defaults[out->id].type;
    /* As a store into the union's member would: the low bytes, the rest stays. */
    memcpy(&out->value, &bits, out->type <= USHORT ? sizes[out->type] : sizeof bits);
}

API int nvmlDeviceGetFieldValues(nvmlDevice_t handle, int count, struct field *out)
{
    struct reply reply;
    int ret = ask(ON(FN_nvmlDeviceGetFieldValues), out, &reply);
    if (ret != SUCCESS || count <= 0)
        return ret != SUCCESS ? ret : INVALID_ARGUMENT;
    int64_t before = clock_ns(CLOCK_REALTIME) / 1000;
    for (int i = 0; i < count; i++) {
        get_field(number_of(handle), &out[i]);
        out[i].timestamp_us = clock_ns(CLOCK_REALTIME) / 1000;
        out[i].latency_us = out[i].timestamp_us - before;
        before = out[i].timestamp_us;
    }
    return SUCCESS;
}

/* A point each 20 ms (power) or 200 ms (utilization) of wall time, each with the
 * value that the script gave for that moment, as many as the driver keeps. */
API int nvmlDeviceGetSamples(nvmlDevice_t handle, unsigned type, unsigned long long last_us,
                             unsigned *value_type, unsigned *count, struct sample *out)
{
    const struct call *call = ON(FN_nvmlDeviceGetSamples, type);
    struct reply reply;
    int ret = ask(call, count, &reply);
    if (ret != SUCCESS)
        return ret;
    if (!value_type || (out && *count == 0))
        return INVALID_ARGUMENT;
    int64_t every_ns = type == 0 ? RING_NS : SLOW_NS, wall_ns = clock_ns(CLOCK_REALTIME);
    int64_t newest = wall_ns / every_ns, epoch_ns = wall_ns - reply.now_ns;
    int64_t first = newest - RING_POINTS + 1, seen = (int64_t)(last_us / (uint64_t)(every_ns / 1000));
    if (seen >= first)
        first = seen + 1;
    if (first > newest || value(call, &reply, 0) == UNSUPPORTED)
        return NOT_FOUND;
    unsigned room = out ? *count : RING_POINTS;
    *count = (unsigned)(newest - first + 1) < room ? (unsigned)(newest - first + 1) : room;
    *value_type = UINT;
    for (unsigned i = 0; out && i < *count; i++) {
        int64_t at_ns = (first + i) * every_ns;
        answer_past(call, at_ns - epoch_ns, &reply);
        out[i] = (struct sample){(unsigned long long)at_ns / 1000, value(call, &reply, 0)};
    }
    return SUCCESS;
}
