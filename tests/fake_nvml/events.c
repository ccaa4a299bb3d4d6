/* Events: a set tells an Xid of a device that was registered with it whenever a
 * step of nvmlEventSetWait_v2 answers; without one nothing has come.
 */
#include "fake.h"

#include <stdlib.h>

enum { TIMEOUT = 10, XID_CRITICAL_ERROR = 8 };

typedef struct event_set { int n, devices[MAX_GPUS]; } *nvmlEventSet_t;

/* nvmlEventData_t under a name of our own. */
struct event {
    nvmlDevice_t device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

API int nvmlEventSetCreate(nvmlEventSet_t *out)
{
    struct reply reply;
    int ret = answer(CALL(FN_nvmlEventSetCreate, 0), &reply);
    if (ret == SUCCESS)
        *out = need(calloc(1, sizeof **out));
    return ret;
}

API int nvmlEventSetFree(nvmlEventSet_t set)
{
    struct reply reply;
    int ret = answer(CALL(FN_nvmlEventSetFree, 0), &reply);
    if (ret == SUCCESS)
        free(set);
    return ret;
}

API int nvmlDeviceRegisterEvents(nvmlDevice_t handle, unsigned long long types, nvmlEventSet_t set)
{
    struct reply reply;
    int ret = ask(ON(FN_nvmlDeviceRegisterEvents), set, &reply);
    if (ret == SUCCESS && types != XID_CRITICAL_ERROR)
        ret = NOT_SUPPORTED;
    if (ret == SUCCESS && set->n < MAX_GPUS)
        set->devices[set->n++] = number_of(handle);
    return ret;
}

API int nvmlEventSetWait_v2(nvmlEventSet_t set, struct event *out, unsigned timeout_ms)
{
    (void)timeout_ms; /* nobody waits in a test */
    for (int i = 0; i < set->n; i++) {
        const struct call *call = CALL(FN_nvmlEventSetWait_v2, set->devices[i]);
        struct reply reply;
        int ret = ask(call, out, &reply);
        if (ret != SUCCESS)
            return ret;
        if (!reply.step)
            continue;
        *out = (struct event){handle_of(set->devices[i]), XID_CRITICAL_ERROR,
                              value(call, &reply, 0), (unsigned)value(call, &reply, 1),
                              (unsigned)value(call, &reply, 2)};
        return SUCCESS;
    }
    return TIMEOUT;
}
