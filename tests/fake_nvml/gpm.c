/* GPM: a caller takes two samples and asks what happened between them. */
#include "fake.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { GPM_VERSION = 1, MAX_METRICS = 512 };
static const int64_t REFRESH_NS = 100000000; /* as measured on an H200 */
static const int64_t WHOLE_GPU = 0xffffffff;

/* nvmlGpmSample_t is opaque, so this is ours; the next two are of nvml.h. */
struct sample { int device; int64_t instance, refresh; };
struct metric { unsigned id; int ret; double value; const char *names[3]; };
struct metrics_get {
    unsigned version, n_metrics;
    const struct sample *first, *second;
    struct metric metrics[];
};
struct support { unsigned version, supported; };

static const struct { bool supported; double value; } defaults[MAX_METRICS] = {
#define METRICS(first, last, value) [first ... last] = {true, value},
#include "functions.h"
};

API int nvmlGpmQueryDeviceSupport(nvmlDevice_t handle, struct support *out)
{
    const struct call *call = ON(FN_nvmlGpmQueryDeviceSupport);
    struct reply reply;
    int ret = ask(call, out, &reply);
    if (ret == SUCCESS && out->version != GPM_VERSION)
        ret = ARGUMENT_VERSION_MISMATCH;
    if (ret == SUCCESS)
        out->supported = (unsigned)value(call, &reply, 0);
    return ret;
}

API int nvmlGpmSampleAlloc(struct sample **out)
{
    struct reply reply;
    int ret = answer(CALL(FN_nvmlGpmSampleAlloc, 0), &reply);
    if (ret != SUCCESS || !out)
        return ret != SUCCESS ? ret : INVALID_ARGUMENT;
    *out = need(calloc(1, sizeof **out));
    (*out)->device = -1;
    return SUCCESS;
}

API int nvmlGpmSampleFree(struct sample *sample)
{
    struct reply reply;
    int ret = answer(CALL(FN_nvmlGpmSampleFree, 0), &reply);
    if (ret != SUCCESS || !sample)
        return ret != SUCCESS ? ret : INVALID_ARGUMENT;
    free(sample);
    return SUCCESS;
}

static int take_sample(const struct call *call, int64_t instance, struct sample *out)
{
    struct reply reply;
    int ret = ask(call, out, &reply);
    if (ret == SUCCESS)
        *out = (struct sample){call->device, instance, reply.now_ns / REFRESH_NS};
    return ret;
}

API int nvmlGpmSampleGet(nvmlDevice_t handle, struct sample *out)
{
    return take_sample(ON(FN_nvmlGpmSampleGet), WHOLE_GPU, out);
}

API int nvmlGpmMigSampleGet(nvmlDevice_t handle, unsigned instance, struct sample *out)
{
    return take_sample(ON(FN_nvmlGpmMigSampleGet, instance), instance, out);
}

uint64_t default_metric(int64_t id)
{
    uint64_t bits;
    memcpy(&bits, &defaults[id < MAX_METRICS ? id : 0].value, sizeof bits);
    return id < MAX_METRICS && defaults[id].supported ? bits : UNSUPPORTED;
}

/* Between two samples of one refresh nothing was counted: not a number. */
static int get_metric(const struct metrics_get *asked, unsigned id, double *out)
{
    const struct call *call = CALL(FN_metric, asked->second->device, id, asked->second->instance);
    struct reply reply;
    uint64_t bits;
    int ret = answer(call, &reply);
    if (ret == SUCCESS && (bits = value(call, &reply, 0)) == UNSUPPORTED)
        ret = NOT_SUPPORTED;
    if (ret != SUCCESS)
        return ret;
    memcpy(out, &bits, sizeof bits);
    if (asked->second->refresh <= asked->first->refresh)
        *out = NAN;
    return SUCCESS;
}

API int nvmlGpmMetricsGet(struct metrics_get *asked)
{
    struct reply reply;
    if (!ready())
        return UNINITIALIZED;
    if (!asked || !asked->first || !asked->second || asked->second->device < 0
        || asked->first->device != asked->second->device
        || asked->first->instance != asked->second->instance)
        return INVALID_ARGUMENT;
    if (asked->version != GPM_VERSION)
        return ARGUMENT_VERSION_MISMATCH;
    int ret = answer_device(CALL(FN_nvmlGpmMetricsGet, asked->second->device), &reply);
    for (unsigned i = 0; ret == SUCCESS && i < asked->n_metrics; i++) {
        struct metric *metric = &asked->metrics[i];
        *metric = (struct metric){.id = metric->id};
        metric->ret = get_metric(asked, metric->id, &metric->value);
    }
    return ret;
}
