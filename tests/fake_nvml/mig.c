/* MIG devices: parts of a GPU with handles of their own. */
#include "fake.h"

bool mig_answers(int function)
{
    switch (function) {
    case FN_nvmlDeviceGetUUID:
    case FN_nvmlDeviceGetName:
    case FN_nvmlDeviceGetIndex:
    case FN_nvmlDeviceGetMemoryInfo:
    case FN_nvmlDeviceGetMemoryInfo_v2:
    case FN_nvmlDeviceGetComputeRunningProcesses_v3:
    case FN_nvmlDeviceGetGraphicsRunningProcesses_v3:
    case FN_nvmlDeviceGetMPSComputeRunningProcesses_v3:
    case FN_nvmlDeviceGetDeviceHandleFromMigDeviceHandle:
    case FN_nvmlDeviceIsMigDeviceHandle:
    case FN_nvmlDeviceGetGpuInstanceId:
    case FN_nvmlDeviceGetComputeInstanceId:
    case FN_nvmlDeviceGetAttributes_v2:
        return true;
    default:
        return false;
    }
}

/* An H100 has 16 multiprocessors, a copy engine and a decoder for each slice. */
uint64_t default_mig(const struct call *call, const struct reply *reply, int part)
{
    const struct device *device = &reply->table->devices[call->device];
    uint64_t bytes = device->memory_mib << 20, n = device->slices;
    switch (call->function) {
    case FN_nvmlDeviceGetIndex:
        return (uint64_t)reply->index;
    case FN_nvmlDeviceIsMigDeviceHandle:
        return 1;
    case FN_nvmlDeviceGetGpuInstanceId:
        return device->gpu_instance;
    case FN_nvmlDeviceGetComputeInstanceId:
        return device->compute_instance;
    case FN_nvmlDeviceGetMemoryInfo:
        return (uint64_t[MAX_DEFAULTS]){bytes, bytes}[part];
    case FN_nvmlDeviceGetMemoryInfo_v2:
        return (uint64_t[MAX_DEFAULTS]){bytes, 0, bytes}[part];
    case FN_nvmlDeviceGetAttributes_v2:
        return (uint64_t[MAX_DEFAULTS]){16 * n, n, n, 0, n, 0, n, n, device->memory_mib}[part];
    default:
        return UNSUPPORTED;
    }
}

API int nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t handle, unsigned index, nvmlDevice_t *out)
{
    const struct call *call = ON(FN_nvmlDeviceGetMigDeviceHandleByIndex, index);
    struct reply reply;
    struct roster migs;
    int ret = ask(call, out, &reply);
    if (ret != SUCCESS)
        return ret;
    if (!reply.mig || index >= MAX_MIG_DEVICES)
        return INVALID_ARGUMENT;
    if (!present(call->device, &migs) || index >= (unsigned)migs.n)
        return NOT_FOUND;
    *out = handle_of(migs.devices[index]);
    return SUCCESS;
}

API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t handle, nvmlDevice_t *out)
{
    const struct call *call = ON(FN_nvmlDeviceGetDeviceHandleFromMigDeviceHandle);
    struct reply reply;
    int ret = ask(call, out, &reply);
    if (ret == SUCCESS && call->device < MAX_GPUS)
        ret = INVALID_ARGUMENT;
    if (ret == SUCCESS)
        *out = handle_of(reply.table->devices[call->device].parent);
    return ret;
}
