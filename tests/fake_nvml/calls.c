/* The calls that answer with numbers, texts and plain structures, made from
 * functions.def. The ABI is that of the real library, as far as nvidia-ml-py uses it.
 */
#include "fake.h"

#include <stdio.h>
#include <string.h>

/* nvmlProcessInfo_t under a name of our own. */
struct process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };

uint64_t advance(uint64_t start, double per_second, int64_t ns)
{
    long double more = (long double)per_second * (long double)ns / 1e9L;
    return more > -9e18L && more < 9e18L ? start + (uint64_t)(int64_t)more : start;
}

static uint64_t default_value(const struct call *call, const struct reply *reply, int part)
{
    const struct function_info *function = &functions[call->function];
    int last_key = 0;
    if (call->device >= MAX_GPUS)
        return default_mig(call, reply, part);
    switch (call->function) {
    case FN_nvmlDeviceGetIndex:
        return (uint64_t)reply->index;
    case FN_nvmlDeviceGetModuleId:
        return (uint64_t)call->device;
    case FN_nvmlDeviceGetMigMode:
        return reply->mig;
    case FN_nvmlDeviceGetMaxMigDeviceCount:
        return reply->mig ? MAX_MIG_DEVICES : 0;
    case FN_nvmlDeviceGetUtilizationRates:
        if (reply->mig)
            return UNSUPPORTED;
        break;
    case FN_field:
        return default_field(call->keys[0], call->keys[1], reply->now_ns);
    case FN_metric:
        return default_metric(call->keys[0]);
    case FN_nvmlDeviceGetMinorNumber:
        return reply->table->devices[call->device].minor;
    default:
        break;
    }
    while (last_key + 1 < MAX_KEYS && function->n[last_key + 1])
        last_key++;
    int at = function->n[0] ? (int)call->keys[last_key] : part;
    uint64_t start = function->values[at < function->n_values ? at : function->n_values - 1];
    return function->per_second ? advance(start, function->per_second, reply->now_ns) : start;
}

uint64_t value(const struct call *call, const struct reply *reply, int part)
{
    const struct step *step = reply->step;
    if (!step || part >= step->n_values || !step->values[part].given)
        return default_value(call, reply, part);
    const struct number *number = &step->values[part];
    uint64_t start = number->start;
    if (number->goes_on) {
        struct reply before = {.table = reply->table};
        answer_past(call, step->start_ns - 1, &before);
        start = value(call, &before, part);
    }
    uint64_t sum = advance(start, number->per_second, reply->now_ns - step->start_ns);
    return number->wrap ? sum % number->wrap : sum;
}

int ask(const struct call *call, const void *out, struct reply *reply)
{
    for (int i = 0; i < MAX_KEYS; i++)
        if (functions[call->function].n[i] && call->keys[i] >= functions[call->function].n[i])
            return ready() ? INVALID_ARGUMENT : UNINITIALIZED;
    int ret = answer_device(call, reply);
    if (ret == SUCCESS && call->device >= MAX_GPUS && !reply->step && !mig_answers(call->function))
        ret = NOT_SUPPORTED;
    return ret == SUCCESS && !out ? INVALID_ARGUMENT : ret;
}

/* Answer with n values. */
static int get(const struct call *call, const void *out, int n, uint64_t *values)
{
    struct reply reply;
    int ret = ask(call, out, &reply);
    for (int i = 0; ret == SUCCESS && i < n; i++)
        if ((values[i] = value(call, &reply, i)) == UNSUPPORTED)
            ret = NOT_SUPPORTED;
    return ret;
}

static int get_uints(const struct call *call, int n, unsigned *const *outs)
{
    uint64_t values[4];
    for (int i = 1; i < n; i++)
        if (!outs[i])
            return INVALID_ARGUMENT;
    int ret = get(call, outs[0], n, values);
    for (int i = 0; ret == SUCCESS && i < n; i++)
        *outs[i] = (unsigned)values[i];
    return ret;
}

static int get_ull(const struct call *call, unsigned long long *out)
{
    uint64_t number;
    int ret = get(call, out, 1, &number);
    if (ret == SUCCESS)
        *out = number;
    return ret;
}

int put_text(char *out, unsigned length, const char *text)
{
    if (strlen(text) >= length)
        return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

static int get_text(const struct call *call, char *out, unsigned length)
{
    struct reply reply;
    char text[96];
    int ret = ask(call, out, &reply);
    if (ret != SUCCESS)
        return ret;
    if (reply.step && reply.step->text)
        return put_text(out, length, reply.step->text);
    if (call->function == FN_nvmlDeviceGetUUID)
        return put_text(out, length, reply.table->devices[call->device].uuid);
    if (call->function == FN_nvmlDeviceGetName)
        return put_text(out, length, reply.table->devices[call->device].name);
    snprintf(text, sizeof text, functions[call->function].text, call->device);
    return put_text(out, length, text);
}

/* Put values where a layout says, and tell the size of the structure. A letter
 * is one member: a value of 1 (B), 4 (I) or 8 bytes (Q), or 4 bytes to leave
 * alone: = and, at the head, the digit of the version that the caller states. */
static size_t lay_out(const char *layout, char *out, const uint64_t *values)
{
    size_t at = 0, widest = 1;
    for (; *layout && *layout != '|'; layout++) {
        size_t size = *layout == 'Q' ? 8 : *layout == 'B' ? 1 : 4;
        at = (at + size - 1) / size * size;
        if (out && strchr("BIQ", *layout))
            memcpy(out + at, values++, size); /* little endian: the low bytes */
        at += size;
        widest = size > widest ? size : widest;
    }
    return (at + widest - 1) / widest * widest;
}

/* Of layouts with versions, each behind a |, the one that the caller asks for. */
static const char *wanted(const char *layout, const void *out)
{
    unsigned version;
    memcpy(&version, out, sizeof version);
    for (; layout; layout = strchr(layout, '|')) {
        layout += *layout == '|';
        if (version == (lay_out(layout, NULL, NULL) | (unsigned)(*layout - '0') << 24))
            return layout;
    }
    return NULL;
}

static int get_struct(const struct call *call, const char *layout, void *out)
{
    uint64_t values[MAX_DEFAULTS];
    int ret = get(call, out, MAX_DEFAULTS, values);
    if (ret == SUCCESS && *layout < 'A' && !(layout = wanted(layout, out)))
        ret = ARGUMENT_VERSION_MISMATCH;
    if (ret == SUCCESS)
        lay_out(layout, out, values);
    return ret;
}

/* The number of records of a list, if there is room for as many. */
static int get_count(const struct reply *reply, int n_parts, unsigned *count, const void *out)
{
    unsigned room = *count;
    *count = reply->step ? (unsigned)(reply->step->n_values / n_parts) : 0;
    if (*count > room)
        return INSUFFICIENT_SIZE;
    return *count && !out ? INVALID_ARGUMENT : SUCCESS;
}

static int get_processes(const struct call *call, unsigned *count, struct process *out)
{
    struct reply reply;
    int ret = ask(call, count, &reply);
    if (ret == SUCCESS)
        ret = get_count(&reply, 4, count, out);
    for (int i = 0; ret == SUCCESS && i < (int)*count; i++)
        out[i] = (struct process){(unsigned)value(call, &reply, 4 * i),
                                  value(call, &reply, 4 * i + 1),
                                  (unsigned)value(call, &reply, 4 * i + 2),
                                  (unsigned)value(call, &reply, 4 * i + 3)};
    return ret;
}

#define UINT(fn, ...)                                             \
    API int fn(nvmlDevice_t handle, unsigned *out)                \
    {                                                             \
        return get_uints(ON(FN_##fn), 1, &out);                        \
    }
#define UINTS(fn, ...)                                            \
    API int fn(nvmlDevice_t handle, unsigned *a, unsigned *b)     \
    {                                                             \
        return get_uints(ON(FN_##fn), 2, (unsigned *[]){a, b});        \
    }
#define UINT_OF(fn, ...)                                          \
    API int fn(nvmlDevice_t handle, unsigned key, unsigned *out)  \
    {                                                             \
        return get_uints(ON(FN_##fn, key), 1, &out);                   \
    }
#define ULL(fn, ...)                                              \
    API int fn(nvmlDevice_t handle, unsigned long long *out)      \
    {                                                             \
        return get_ull(ON(FN_##fn), out);                              \
    }
#define ULL_OF2(fn, ...)                                          \
    API int fn(nvmlDevice_t handle, unsigned a, unsigned b, unsigned long long *out) \
    {                                                             \
        return get_ull(ON(FN_##fn, a, b), out);                        \
    }
#define ULL_OF3(fn, ...)                                          \
    API int fn(nvmlDevice_t handle, unsigned a, unsigned b, unsigned c, unsigned long long *out) \
    {                                                             \
        return get_ull(ON(FN_##fn, a, b, c), out);                     \
    }
#define TEXT(fn, text)                                            \
    API int fn(nvmlDevice_t handle, char *out, unsigned length)   \
    {                                                             \
        return get_text(ON(FN_##fn), out, length);                     \
    }
#define STRUCT(fn, layout, ...)                                   \
    API int fn(nvmlDevice_t handle, void *out)                    \
    {                                                             \
        return get_struct(ON(FN_##fn), layout, out);                   \
    }
#define PROCESSES(fn)                                             \
    API int fn(nvmlDevice_t handle, unsigned *count, struct process *out) \
    {                                                             \
        return get_processes(ON(FN_##fn), count, out);                 \
    }
#include "functions.h"

API int nvmlDeviceGetRemappedRows(nvmlDevice_t handle, unsigned *corrected,
                                  unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
    return get_uints(ON(FN_nvmlDeviceGetRemappedRows), 4,
                     (unsigned *[]){corrected, uncorrected, pending, failed});
}

API int nvmlDeviceGetRetiredPages_v2(nvmlDevice_t handle, unsigned cause, unsigned *count,
                                     unsigned long long *addresses, unsigned long long *times)
{
    const struct call *call = ON(FN_nvmlDeviceGetRetiredPages_v2, cause);
    struct reply reply;
    int ret = ask(call, count, &reply);
    if (ret == SUCCESS && !reply.step)
        ret = NOT_SUPPORTED; /* GPUs that remap rows retire no pages */
    if (ret == SUCCESS)
        ret = get_count(&reply, 2, count, addresses);
    for (int i = 0; ret == SUCCESS && i < (int)*count; i++) {
        addresses[i] = value(call, &reply, 2 * i);
        times[i] = value(call, &reply, 2 * i + 1);
    }
    return ret;
}

/* Of another version than the driver only if the script says so. */
API int nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t handle, char *out)
{
    struct reply reply;
    char version[80];
    int ret = ask(ON(FN_nvmlDeviceGetGspFirmwareVersion), out, &reply);
    if (ret != SUCCESS)
        return ret;
    driver_version(false, version);
    const char *text = reply.step ? reply.step->text : NULL;
    return put_text(out, 64, text ? text : version); /* NVML_GSP_FIRMWARE_VERSION_BUF_SIZE */
}

/* What the script says of two GPUs, which are different ones. */
static int get_of_two(const struct call *call, nvmlDevice_t other, unsigned *out)
{
    if (call->keys[0] < 0 || call->keys[0] >= MAX_GPUS || call->keys[0] == call->device || !other)
        return ready() ? INVALID_ARGUMENT : UNINITIALIZED;
    return get_uints(call, 1, &out);
}

API int nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t handle, nvmlDevice_t other,
                                            unsigned *out)
{
    return get_of_two(ON(FN_nvmlDeviceGetTopologyCommonAncestor, number_of(other)), other, out);
}

API int nvmlDeviceGetP2PStatus(nvmlDevice_t handle, nvmlDevice_t other, unsigned what,
                               unsigned *out)
{
    return get_of_two(ON(FN_nvmlDeviceGetP2PStatus, number_of(other), what), other, out);
}
